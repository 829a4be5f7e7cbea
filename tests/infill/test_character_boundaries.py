"""Where a text may be divided without breaking a character."""

import pytest

from midfill.infill.character_boundaries import boundary_before, divides_character

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
FLAGS = "\U0001f1eb\U0001f1f7\U0001f1e9\U0001f1ea"  # France, Germany


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("abc", [1, 2]),
        ("a\r\nb", [1, 3]),
        ("a\n\rb", [1, 2, 3]),
        ("a\n\u0301", [1, 2]),
        ("xe\u0301y", [1, 3]),
        ("a" + FAMILY + "b", [1, 6]),
        ("\U0001f44d\U0001f3fd!", [2]),
        (FLAGS, [2]),
        ("a\u0915\u094d\u0937", [1, 3]),  # a consonant after a virama stands for itself
        ("\u1112\u1161\u11ab\u1100", [3]),  # a syllable in parts, then the next one's first
    ],
)
def test_a_character_of_several_code_points_stays_whole(text: str, whole: list[int]) -> None:
    places = range(1, len(text))
    assert [place for place in places if not divides_character(text, place)] == whole


def test_the_ends_of_a_text_divide_nothing() -> None:
    for text in ("", "\u0301", "\n"):
        assert not divides_character(text, 0)
        assert not divides_character(text, len(text))


def test_a_boundary_is_the_last_one_that_divides_nothing() -> None:
    text = "ab" + FAMILY + "c"
    assert [boundary_before(text, place) for place in range(len(text) + 1)] == [
        0, 1, 2, 2, 2, 2, 2, 7, 8,
    ]  # fmt: skip


def test_combining_marks_without_end_are_divided_somewhere() -> None:
    text = "a" + "\u0301" * 1000
    assert boundary_before(text, 100) == 0
    assert boundary_before(text, 900) == 900
