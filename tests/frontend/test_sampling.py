"""SamplingParams: which values are refused, and what is passed to the engine."""

import math

import pytest

from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.frontend.sampling import SamplingParams, check_sampling

VOCAB = 100
BAD = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**30), ("n", 0), ("n", 10**9),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("top_k", -2), ("top_k", 2**40), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan), ("typical_p", 0.0),
    ("presence_penalty", 3.0), ("frequency_penalty", math.nan), ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf), ("seed", 2**63), ("logprobs", 21), ("logprobs", -1),
    ("logit_bias", {VOCAB: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {0: math.nan}),
    ("logit_bias", {0: 101.0}), ("stop_token_ids", (VOCAB,)), ("stop_token_ids", (-1,)),
    ("stop_token_ids", tuple(range(50)) * 30), ("stop", ("",)), ("stop", ("x" * 300,)),
    ("stop", tuple(map(str, range(10_000)))),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{f}-{str(v)[:12]}" for f, v in BAD])
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    sampling = SamplingParams(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=rf"^{field} ") as raised:
        check_sampling(sampling, VOCAB)
    assert raised.value.param == field
    assert len(str(raised.value)) < 200


def test_the_clients_own_spelling_is_used() -> None:
    with pytest.raises(InvalidRequestError, match=r"^max_completion_tokens must") as raised:
        check_sampling(SamplingParams(max_tokens=0), VOCAB, {"max_tokens": "max_completion_tokens"})
    assert raised.value.param == "max_completion_tokens"


def test_ordinary_values_are_accepted() -> None:
    sampling = SamplingParams(
        max_tokens=5, temperature=0.2, top_p=0.95, top_k=20, seed=-1, stop=("\n",), logprobs=0, n=3
    )
    check_sampling(sampling, VOCAB)
    check_sampling(SamplingParams(), VOCAB)


def test_the_engine_gets_its_own_fields_and_the_prompts_end_tokens() -> None:
    sampling = SamplingParams(max_tokens=5, stop=("\n",), stop_token_ids=(7, 3))
    assert sampling.for_engine((3, 9)) == EngineSamplingParams(
        max_tokens=5, stop_token_ids=(7, 3, 9)
    )


def test_ignore_eos_leaves_the_prompts_end_tokens_out() -> None:
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(7,))
    assert sampling.for_engine((3, 9)).stop_token_ids == (7,)
