"""Trimming: each cut on its own, and all of them together."""

import pytest

from midfill import SamplingParams, Trimming
from midfill.errors import InvalidRequestError

PREFIX, SUFFIX = "def f(x):\n    return g(", ")\n\nprint(f(1))\n"
ANSWER = "x, [1)\n\nprint(f(1))\n"


@pytest.mark.parametrize(
    ("trimming", "kept"),
    [
        (Trimming(), ANSWER),
        (Trimming(overlap=True), "x, [1"),
        (Trimming(lines="single"), "x, [1)"),
        (Trimming(lines="block"), "x, [1)"),
        (Trimming(overlap=True, brackets="close"), "x, [1]"),
        (Trimming(overlap=True, lines="single", brackets="close"), "x, [1]"),
    ],
)
def test_only_what_is_asked_for_is_cut(trimming: Trimming, kept: str) -> None:
    assert trimming.apply(ANSWER, PREFIX, SUFFIX) == kept


def test_nothing_is_held_back_unless_something_may_be_cut() -> None:
    assert not Trimming()
    assert not SamplingParams().trimming
    assert Trimming(overlap=True)
    assert Trimming(brackets="close")


@pytest.mark.parametrize("field", ["lines", "brackets"])
def test_unknown_modes_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field) as raised:
        Trimming(**{field: "some"})
    assert raised.value.param == field
