"""Stop strings that are tokens: editors send a model family's end tokens as ``stop`` strings.

A special token has no text, so no stop string would ever find it in an answer. One of the served
model's own therefore ends the answer as a token. Those of other families mean nothing here: with an
infilling request they are dropped, since they could only end an answer that is about such tokens.
"""

from collections.abc import Sequence

import msgspec

from midfill.frontend.prompt import Prompt
from midfill.frontend.sampling import SamplingParams
from midfill.infill.template import sentinel_texts
from midfill.tokens.tokenizer import Tokenizer


def with_token_stops(
    sampling: SamplingParams, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> SamplingParams:
    """Return sampling parameters whose stop strings are text alone.

    Args:
        sampling: as the client asks for it.
        prompts: the request's prompts; foreign tokens are dropped if all are for infilling.
        tokenizer: the served model's.
    """
    own = [
        token_id
        for stop in sampling.stop
        if (token_id := tokenizer.special_tokens.get(stop)) is not None
        and not tokenizer.token_bytes(token_id)
    ]
    kept = sampling.stop
    if all(prompt.infilling for prompt in prompts):
        known = sentinel_texts().union(tokenizer.special_tokens)
        kept = tuple(stop for stop in kept if stop not in known)
    if not own and kept == sampling.stop:
        return sampling
    stops = dict.fromkeys((*sampling.stop_token_ids, *own))
    return msgspec.structs.replace(sampling, stop=kept, stop_token_ids=tuple(stops))
