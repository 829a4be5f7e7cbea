"""Stop strings that are tokens: editors send a model family's end tokens as ``stop`` strings.

A special token has no text, so no stop string would ever find it in an answer. One of the served
model's own therefore ends the answer as a token; an end token does so anyway, and such an end is an
ordinary one, for which no stop is to blame. Tokens of other families mean nothing here: with an
infilling request they are dropped, since they could only end an answer that is about such tokens.
"""

from collections.abc import Sequence

import msgspec

from midfill.frontend.prompt import Prompt
from midfill.frontend.sampling import SamplingParams
from midfill.infill.template import sentinel_texts
from midfill.models.tokens.tokenizer import Tokenizer


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
    ends = frozenset() if sampling.ignore_eos else _end_tokens(prompts, tokenizer)
    further = [token_id for token_id in own if token_id not in ends]
    stops = dict.fromkeys((*sampling.stop_token_ids, *further))
    return msgspec.structs.replace(sampling, stop=kept, stop_token_ids=tuple(stops))


def _end_tokens(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end the answers to all of the prompts without being asked for."""
    further = [frozenset(prompt.stop_token_ids) for prompt in prompts]
    shared = frozenset.intersection(*further) if further else frozenset()
    return shared.union(tokenizer.eos_token_ids)
