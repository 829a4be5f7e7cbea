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
        (PostProcessing(), ANSWER),
        (PostProcessing(overlap=True), "x, [1"),
        (PostProcessing(lines="single"), "x, [1)"),
        (PostProcessing(lines="block"), "x, [1)"),
        (PostProcessing(overlap=True, brackets="close"), "x, [1]"),
        (PostProcessing(overlap=True, lines="single", brackets="close"), "x, [1]"),
    ],
)
def test_only_what_is_asked_for_is_changed(post_processing: PostProcessing, kept: str) -> None:
    assert post_processing.apply(ANSWER, PREFIX, SUFFIX) == kept


def test_nothing_is_held_back_unless_the_answer_may_change() -> None:
    assert not PostProcessing()
    assert not SamplingParams().post_processing
    assert PostProcessing(overlap=True)
    assert PostProcessing(brackets="close")


@pytest.mark.parametrize("field", ["lines", "brackets"])
def test_unknown_modes_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field) as raised:
        PostProcessing(**{field: "some"})
    assert raised.value.param == field


def test_the_old_names_still_work_for_one_release() -> None:
    with pytest.warns(DeprecationWarning, match=r"midfill\.PostProcessing"):
        assert midfill.Trimming is PostProcessing
    with pytest.warns(DeprecationWarning, match="post_processing"):
        sampling = SamplingParams(trimming=PostProcessing(overlap=True))
    assert sampling == SamplingParams(post_processing=PostProcessing(overlap=True))
