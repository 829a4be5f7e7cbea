"""PostProcessing: each change on its own, and all of them together."""

import pytest

import midfill
from midfill import PostProcessing, SamplingParams
from midfill.errors import InvalidRequestError

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
