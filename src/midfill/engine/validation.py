"""Which requests can't be served: the ranges of sampling parameters, and what the model allows."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from midfill.engine.request import EngineRequest, EngineSamplingParams, RequestHints
from midfill.errors import InvalidRequestError

MAX_ANSWERS = 128
# A constraint costs the square of its length; healing takes back a few tokens.
_MAX_BEGINS_WITH_BYTES = 128
_MAX_PROGRAM_NAME = 256
_SHOWN = 60  # characters of a value in an error


class SamplingRange(NamedTuple):
    """The values that a sampling parameter may have.

    Attributes:
        field: name of the parameter.
        contains: whether a value of the right type is allowed; False for NaN.
        meaning: completes the sentence "FIELD must be ...".
    """

    field: str
    contains: Callable[[Any], bool]
    meaning: str


SAMPLING_RANGES = (
    SamplingRange("max_tokens", lambda value: 1 <= value < 2**31, "at least 1"),
    SamplingRange("n", lambda value: 1 <= value <= MAX_ANSWERS, f"from 1 to {MAX_ANSWERS}"),
    SamplingRange(
        "temperature",
        lambda value: math.isfinite(value) and 0 <= value <= 100,
        "a number from 0 to 100",
    ),
    SamplingRange("top_k", lambda value: 0 <= value < 2**31, "0 (all tokens) or more"),
    SamplingRange("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    SamplingRange("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
    SamplingRange("typical_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    SamplingRange("presence_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
    SamplingRange("frequency_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
    SamplingRange("repetition_penalty", lambda value: 0 < value <= 100, "above 0 and at most 100"),
    SamplingRange(
        "seed",
        lambda value: value is None or -(2**63) <= value < 2**63,
        "a 64-bit whole number",
    ),
)


def check_parameter(
    params: EngineSamplingParams,
    field: str,
    holds: bool,
    meaning: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Refuse a sampling parameter whose value is out of range.

    Args:
        params: the parameters.
        field: the parameter's name.
        holds: whether its value is allowed.
        meaning: completes the sentence "FIELD must be ...".
        names: the client's names of fields, where they differ.

    Raises:
        InvalidRequestError: ``holds`` is false; names the field as the client does.
    """
    if not holds:
        name = (names or {}).get(field, field)
        value = _shortened(getattr(params, field))
        raise InvalidRequestError(f"{name} must be {meaning}, not {value}", param=name)


def check_sampling_ranges(
    params: EngineSamplingParams,
    vocab: int,
    max_logprobs: int,
    names: Mapping[str, str] | None = None,
) -> None:
    """Refuse sampling parameters that are out of range.

    Args:
        params: of the right types already.
        vocab: token ids are below it.
        max_logprobs: maximum number of log probabilities per position.
        names: the client's names of fields, where they differ.

    Raises:
        InvalidRequestError: names the first field that is out of range.
    """
    for field, contains, meaning in SAMPLING_RANGES:
        check_parameter(params, field, contains(getattr(params, field)), meaning, names)
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        fits = value is None or 0 <= value <= max_logprobs
        check_parameter(params, field, fits, f"from 0 to {max_logprobs}", names)
    for token_id, bias in params.logit_bias.items():
        known = 0 <= token_id < vocab
        check_parameter(params, "logit_bias", known, f"of token ids from 0 to {vocab - 1}", names)
        check_parameter(
            params, "logit_bias", -100 <= bias <= 100, "of values from -100 to 100", names
        )


def validate(request: EngineRequest, vocab: int, max_length: int) -> None:
    """Refuse a request that the model or the pool can't serve.

    Args:
        request: the request.
        vocab: token ids are below it.
        max_length: maximum number of tokens, prompt and answer together.

    Raises:
        InvalidRequestError: names the field; code ``context_length_exceeded`` for a prompt that
            leaves no room for one token of the answer.
    """
    _check_prompt(request.token_ids, vocab, max_length)
    count = len(request.token_ids)
    if len(request.begins_with) > _MAX_BEGINS_WITH_BYTES:
        raise InvalidRequestError(
            f"begins_with has {len(request.begins_with)} bytes; "
            f"at most {_MAX_BEGINS_WITH_BYTES} can be required of an answer",
            param="begins_with",
        )
    if not 0.0 <= request.empty_threshold <= 1.0:
        raise InvalidRequestError(
            f"empty_threshold must be from 0 to 1, not {request.empty_threshold}",
            param="empty_threshold",
        )
    if not 0 <= request.compress_after <= count:
        raise InvalidRequestError(
            f"compress_after must be from 0 to the prompt's {count} tokens, "
            f"not {request.compress_after}",
            param="compress_after",
        )
    if request.compress_after % count and request.sampling.n > 1:
        raise InvalidRequestError(
            "compress_after takes n = 1: answers can't share what follows compressed tokens",
            param="n",
        )
    if not 1 <= request.score_from <= max(count - 1, 1):
        raise InvalidRequestError(
            f"score_from must be from 1 to {max(count - 1, 1)}, the prompt's last token, "
            f"not {request.score_from}",
            param="score_from",
        )
    check_sampling_ranges(request.sampling, vocab, max_logprobs=vocab)
    check_hints(request.hints)
    if request.deadline is not None and math.isnan(request.deadline):
        raise InvalidRequestError("deadline must be a number, not nan", param="deadline")
    if request.prediction and not 0 <= min(request.prediction) <= max(request.prediction) < vocab:
        raise InvalidRequestError(
            f"prediction holds a token id outside 0..{vocab - 1}", param="prediction"
        )
    if request.answered:
        _check_answered(request, vocab, max_length)


def _check_prompt(token_ids: Sequence[int], vocab: int, max_length: int) -> None:
    """Refuse a prompt that is empty, that leaves no room for an answer, or with unknown ids."""
    count = len(token_ids)
    if count == 0:
        raise InvalidRequestError(
            "the prompt is empty: it needs at least one token", param="prompt"
        )
    if count + 1 > max_length:
        raise InvalidRequestError(
            f"the prompt has {count} tokens, but at most {max_length} fit, "
            "the answer's first token included; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab:
        raise InvalidRequestError(
            f"the prompt holds a token id outside 0..{vocab - 1}", param="prompt"
        )


def check_hints(hints: RequestHints) -> None:
    """Refuse hints that make no sense. Those that are only exaggerated are clamped elsewhere.

    Raises:
        InvalidRequestError: names the field as clients do.
    """
    if not -(2**31) <= hints.priority < 2**31:
        raise InvalidRequestError.of_field(
            "priority", f"must be a 32-bit whole number, not {hints.priority}"
        )
    if hints.expected_tokens is not None and hints.expected_tokens < 0:
        raise InvalidRequestError.of_field(
            "expected_tokens", f"must be at least 0, not {hints.expected_tokens}"
        )
    if len(hints.program) > _MAX_PROGRAM_NAME:
        raise InvalidRequestError.of_field(
            "job_id",
            f"has {len(hints.program)} characters; a program's name has at most"
            f" {_MAX_PROGRAM_NAME}",
        )
    if hints.last_step and not hints.program:
        raise InvalidRequestError.of_field("is_last_step", "needs job_id, the program's name")


def _check_answered(request: EngineRequest, vocab: int, max_length: int) -> None:
    """Refuse an answer that can't go on here.

    Raises:
        InvalidRequestError: there are too many tokens, or unknown ones, or the request wants what
            is decided with the first token.
    """
    answered, sampling = request.answered, request.sampling
    room = min(sampling.max_tokens, max_length - len(request.token_ids))
    if len(answered) >= room or min(answered) < 0 or max(answered) >= vocab:
        raise InvalidRequestError(
            f"answered holds {len(answered)} tokens; an answer that goes on has fewer than {room},"
            f" from 0 to {vocab - 1}",
            param="answered",
        )
    method = request.method is not None and request.method != "none"
    if method or request.background or sampling.n > 1 or sampling.prompt_logprobs is not None:
        raise InvalidRequestError(
            "an answer that was begun elsewhere takes n = 1, no prompt_logprobs and no method",
            param="answered",
        )


def _shortened(value: object) -> str:
    """Return the beginning of a value's repr, without looking at all of a large one."""
    if isinstance(value, dict):
        value = dict(islice(value.items(), _SHOWN))
    elif isinstance(value, tuple):
        value = tuple(each[:_SHOWN] if isinstance(each, str) else each for each in value[:_SHOWN])
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
