"""Ranges of sampling parameters: one table, which the engine and the public parameters share."""

import math

import pytest

from midfill.engine.request import EngineRequest, EngineSamplingParams, RequestHints
from midfill.engine.validation import SAMPLING_RANGES, check_sampling_ranges, validate
from midfill.errors import InvalidRequestError
from midfill.frontend.sampling import SamplingParams, check_sampling

VOCAB = 50
# By field: the least and the greatest value that are allowed, and one beyond each of them.
BOUNDS = {
    "max_tokens": ((1, 2**31 - 1), (0, 2**31)),
    "n": ((1, 128), (0, 129)),
    "temperature": ((0.0, 100.0), (-0.01, 100.1)),
    "top_k": ((0, 2**31 - 1), (-1, 2**31)),
    "top_p": ((1e-9, 1.0), (0.0, 1.001)),
    "min_p": ((0.0, 1.0), (-0.001, 1.001)),
    "typical_p": ((1e-9, 1.0), (0.0, 1.001)),
    "presence_penalty": ((-2.0, 2.0), (-2.1, 2.1)),
    "frequency_penalty": ((-2.0, 2.0), (-2.1, 2.1)),
    "repetition_penalty": ((1e-9, 100.0), (0.0, 100.1)),
    "seed": ((-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
}
FLOATS = [field for field, (inside, _) in BOUNDS.items() if isinstance(inside[0], float)]


def test_every_range_is_listed_here() -> None:
    assert [entry.field for entry in SAMPLING_RANGES] == list(BOUNDS)


@pytest.mark.parametrize("field", BOUNDS)
def test_bounds(field: str) -> None:
    inside, outside = BOUNDS[field]
    for value in inside:
        check_sampling_ranges(EngineSamplingParams(**{field: value}), VOCAB, VOCAB)
    for value in outside:
        with pytest.raises(InvalidRequestError, match=rf"^{field} must be .*, not ") as error:
            check_sampling_ranges(EngineSamplingParams(**{field: value}), VOCAB, VOCAB)
        assert error.value.param == field


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(field: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field} must be "):
        check_sampling_ranges(EngineSamplingParams(**{field: value}), VOCAB, VOCAB)


@pytest.mark.parametrize("field", BOUNDS)
def test_public_parameters_get_the_same_message(field: str) -> None:
    value = BOUNDS[field][1][0]
    with pytest.raises(InvalidRequestError) as engine:
        check_sampling_ranges(EngineSamplingParams(**{field: value}), VOCAB, VOCAB)
    with pytest.raises(InvalidRequestError) as public:
        check_sampling(SamplingParams(**{field: value}), VOCAB)
    assert str(engine.value) == str(public.value)


def test_the_models_vocabulary_limits_token_ids_and_logprobs() -> None:
    check_sampling_ranges(EngineSamplingParams(logprobs=VOCAB), VOCAB, max_logprobs=VOCAB)
    with pytest.raises(InvalidRequestError, match=r"^logprobs must be from 0 to 20"):
        check_sampling_ranges(EngineSamplingParams(logprobs=21), VOCAB, max_logprobs=20)
    with pytest.raises(InvalidRequestError, match=r"^logit_bias must be of token ids from 0 to 49"):
        check_sampling_ranges(EngineSamplingParams(logit_bias={VOCAB: 1.0}), VOCAB, VOCAB)


def test_an_empty_prompt_is_refused() -> None:
    asked = EngineRequest(request_id="r", token_ids=[], sampling=EngineSamplingParams())
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        validate(asked, VOCAB, max_length=10)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"compress_after": -1}, "compress_after"),
        ({"compress_after": 5}, "compress_after"),
        ({"compress_after": 2, "sampling": EngineSamplingParams(n=2)}, "n"),
        ({"score_from": 0}, "score_from"),
        ({"score_from": 4}, "score_from"),
    ],
)
def test_parts_of_a_prompt_lie_within_it(fields: dict[str, object], names: str) -> None:
    request = EngineRequest(
        **{"request_id": "r", "token_ids": [1, 2, 3, 4], "sampling": EngineSamplingParams()}  # type: ignore[arg-type]
        | fields
    )
    with pytest.raises(InvalidRequestError) as error:
        validate(request, VOCAB, 100)
    assert error.value.param == names


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        (RequestHints(priority=2**31), "priority must be a 32-bit whole number, not 2147483648"),
        (RequestHints(expected_tokens=-1), "expected_tokens must be at least 0, not -1"),
        (RequestHints(program="x" * 257), "job_id has 257 characters; a program's name has at"),
        (RequestHints(last_step=True), "is_last_step needs job_id, the program's name"),
    ],
)
def test_hints_that_make_no_sense_are_refused(hints: RequestHints, said: str) -> None:
    request = EngineRequest(
        request_id="a", token_ids=[1], sampling=EngineSamplingParams(), hints=hints
    )
    with pytest.raises(InvalidRequestError) as error:
        validate(request, VOCAB, 100)
    assert str(error.value).startswith(said)
    assert error.value.param == said.split()[0]


def test_a_deadline_that_is_no_number_is_refused() -> None:
    request = EngineRequest(
        request_id="a", token_ids=[1], sampling=EngineSamplingParams(), deadline=math.nan
    )
    with pytest.raises(InvalidRequestError, match=r"^deadline must be a number, not nan"):
        validate(request, VOCAB, 100)
