"""When a prompt is computed before the editor asks."""

import pytest

from midfill.lsp.documents import Change, Document, Place
from midfill.lsp.warming import CaretPlace, caret_after

BEFORE = Document.opened("file:///a", "one\ntwo\n", "utf-16")


@pytest.mark.parametrize(
    ("change", "caret"),
    [
        (Change("x", Place(1, 1), Place(1, 1)), 6),
        (Change("", Place(1, 1), Place(1, 3)), 5),
        (Change("", Place(1, 3), Place(1, 1)), 5),
        (Change("a\n  ", Place(0, 3), Place(1, 0)), 7),
        (Change("x" * 201, Place(0, 0), Place(0, 0)), None),
        (Change("all of it"), None),
    ],
)
def test_a_change_tells_where_the_caret_is(change: Change, caret: int | None) -> None:
    assert caret_after(BEFORE, [change]) == caret


def test_several_changes_tell_nothing() -> None:
    change = Change("x", Place(0, 0), Place(0, 0))
    assert caret_after(BEFORE, [change, change]) is None
    assert caret_after(BEFORE, []) is None


def test_carets_in_adjacent_lines_are_near() -> None:
    place = CaretPlace("a", 5)
    assert [place.near(CaretPlace("a", line)) for line in (3, 4, 5, 6, 7)] == [
        False, True, True, True, False,
    ]  # fmt: skip
    assert not place.near(CaretPlace("b", 5))
    assert not place.near(None)
