"""Which requests the engine refuses: what can never run, and numbers that mean nothing."""

import numpy as np

from midfill.engine.request import EngineRequest, SamplingParams
from midfill.errors import InvalidRequestError

_MOST_ANSWERS = 128
# A constraint costs the square of its length; healing takes back a few tokens.
_MOST_REQUIRED_BYTES = 128


def validate(request: EngineRequest, vocab: int, longest: int) -> None:
    """Check a request against the model and the pool.

    Args:
        request: what came in.
        vocab: token ids are below it.
        longest: tokens, prompt and answer together, that context and pool allow.

    Raises:
        InvalidRequestError: names the field; code ``context_length_exceeded`` for a prompt that
            leaves no room for one token of answer.
    """
    count = len(request.token_ids)
    if count == 0:
        raise InvalidRequestError(
            "the prompt is empty: it needs at least one token", param="prompt"
        )
    if count + 1 > longest:
        raise InvalidRequestError(
            f"the prompt has {count} tokens, but at most {longest} fit, "
            "the answer's first token included; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    try:
        ids = np.array(request.token_ids, dtype=np.int64)
        in_range = int(ids.min()) >= 0 and int(ids.max()) < vocab
    except OverflowError:
        in_range = False
    if not in_range:
        raise InvalidRequestError(
            f"the prompt holds a token id outside 0..{vocab - 1}", param="prompt"
        )
    if len(request.begins_with) > _MOST_REQUIRED_BYTES:
        raise InvalidRequestError(
            f"begins_with has {len(request.begins_with)} bytes; "
            f"at most {_MOST_REQUIRED_BYTES} can be required of an answer",
            param="begins_with",
        )
    _validate_sampling(request.sampling, vocab)


def _validate_sampling(params: SamplingParams, vocab: int) -> None:
    def require(holds: bool, field: str, meaning: str) -> None:
        if not holds:
            value = getattr(params, field)
            raise InvalidRequestError(f"{field} must be {meaning}, not {value}", param=field)

    require(params.max_tokens >= 1, "max_tokens", "at least 1")
    require(1 <= params.n <= _MOST_ANSWERS, "n", f"from 1 to {_MOST_ANSWERS}")
    # Written so that NaN fails each of them.
    require(0.0 <= params.temperature <= 100.0, "temperature", "from 0 to 100")
    require(params.top_k >= 0, "top_k", "at least 0 (0 keeps all tokens)")
    require(0.0 < params.top_p <= 1.0, "top_p", "above 0 and at most 1")
    require(0.0 <= params.min_p <= 1.0, "min_p", "from 0 to 1")
    require(0.0 < params.typical_p <= 1.0, "typical_p", "above 0 and at most 1")
    require(-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "from -2 to 2")
    require(-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "from -2 to 2")
    require(
        0.0 < params.repetition_penalty <= 100.0, "repetition_penalty", "above 0 and at most 100"
    )
    require(
        params.logprobs is None or 0 <= params.logprobs <= vocab, "logprobs", f"from 0 to {vocab}"
    )
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab:
            raise InvalidRequestError(
                f"logit_bias names token id {token_id}, which is outside 0..{vocab - 1}",
                param="logit_bias",
            )
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequestError(
                f"logit_bias of token id {token_id} must be from -100 to 100, not {bias}",
                param="logit_bias",
            )
