"""SamplingParams: which values are refused, and what is passed to the engine."""

import math

import pytest

import midfill
from midfill import PostProcessing
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


PREFIX, SUFFIX = "def f(x):\n    return g(", ")\n\nprint(f(1))\n"
ANSWER = "x, [1)\n\nprint(f(1))\n"


@pytest.mark.parametrize(
    ("post_processing", "kept"),
    [
        (PostProcessing(overlap=False), ANSWER),
        (PostProcessing(), "x, [1"),
        (PostProcessing(overlap=True), "x, [1"),
        (PostProcessing(overlap=False, lines="single"), "x, [1)"),
        (PostProcessing(overlap=False, lines="block"), "x, [1)"),
        (PostProcessing(brackets="close"), "x, [1]"),
        (PostProcessing(overlap=False, brackets="close"), f"{ANSWER}]"),
        (PostProcessing(lines="single", brackets="close"), "x, [1]"),
        (PostProcessing(overlap=False, min_indent=1), "x, [1)"),
    ],
)
def test_only_what_is_asked_for_is_changed(post_processing: PostProcessing, kept: str) -> None:
    assert post_processing.apply(ANSWER, PREFIX, SUFFIX) == kept


def test_overlap_is_cut_where_a_request_infills_unless_it_says_otherwise() -> None:
    assert PostProcessing().trimmer(PREFIX, SUFFIX, infilling=True) is not None
    assert PostProcessing().trimmer(PREFIX, SUFFIX, infilling=False) is None
    assert PostProcessing(overlap=False).trimmer(PREFIX, SUFFIX, infilling=True) is None
    assert PostProcessing(overlap=True).trimmer(PREFIX, SUFFIX, infilling=False) is not None
    assert PostProcessing(lines="block").trimmer(PREFIX, SUFFIX, infilling=False) is not None


def test_line_breaks_are_reported_at_once_where_they_may_end_the_answer() -> None:
    assert SamplingParams().stop_bytes == b""
    assert SamplingParams(post_processing=PostProcessing(lines="block")).stop_bytes == b"\n"
    assert SamplingParams(post_processing=PostProcessing(lines="single")).stop_bytes == b"\n"
    assert SamplingParams(post_processing=PostProcessing(min_indent=2)).stop_bytes == b"\n"
    assert SamplingParams(post_processing=PostProcessing(max_seconds=1)).stop_bytes == b"\n"
    assert SamplingParams(stop=("ab",)).stop_bytes == b"b"


@pytest.mark.parametrize("field", ["lines", "brackets"])
def test_unknown_modes_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field) as raised:
        PostProcessing(**{field: "some"})
    assert raised.value.param == field


@pytest.mark.parametrize("field", ["min_indent", "max_seconds"])
def test_negative_numbers_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} must be at least 0"):
        PostProcessing(**{field: -1})


def test_the_old_names_still_work_for_one_release() -> None:
    with pytest.warns(DeprecationWarning, match=r"midfill\.PostProcessing"):
        assert midfill.Trimming is PostProcessing
    with pytest.warns(DeprecationWarning, match="post_processing"):
        sampling = SamplingParams(trimming=PostProcessing(overlap=True))
    assert sampling == SamplingParams(post_processing=PostProcessing(overlap=True))
