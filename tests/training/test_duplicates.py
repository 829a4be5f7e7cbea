"""Texts and their versions are recognised by their lines."""

from hypothesis import given
from hypothesis import strategies as st

from midfill.training.duplicates import SeenTexts

LINES = [f"line number {number} of the text" for number in range(100)]


def text(*lines: str) -> str:
    return "\n".join(lines)


def test_a_text_is_new_once() -> None:
    seen = SeenTexts(0.6)
    assert seen.add_new(text(*LINES))
    assert not seen.add_new(text(*LINES))


def test_a_version_with_more_than_the_share_of_its_lines_seen_is_not_new() -> None:
    seen = SeenTexts(0.6)
    seen.add(text(*LINES[:61]))
    assert not seen.add_new(text(*LINES))
    seen = SeenTexts(0.6)
    seen.add(text(*LINES[:60]))
    assert seen.add_new(text(*LINES))


def test_indentation_and_order_do_not_matter() -> None:
    seen = SeenTexts(0.6)
    seen.add(text(*LINES))
    assert not seen.add_new(text(*(f"    {line}\r" for line in reversed(LINES))))


def test_short_lines_do_not_count() -> None:
    seen = SeenTexts(0.6)
    seen.add(text("import os", "try:", "else:", LINES[0]))
    assert seen.add_new(text("import os", "try:", "else:", LINES[1]))


def test_lines_of_a_refused_text_are_not_remembered() -> None:
    seen = SeenTexts(0.6)
    seen.add(text(*LINES[:7]))
    assert not seen.add_new(text(*LINES[:10]))
    assert seen.add_new(text(*LINES[7:10]))


def test_lines_of_an_added_text_are_remembered_whatever_was_seen() -> None:
    seen = SeenTexts(0.6)
    seen.add(text(*LINES[:7]))
    seen.add(text(*LINES[:10]))
    assert not seen.add_new(text(*LINES[7:10]))


def test_a_copy_goes_its_own_way() -> None:
    seen = SeenTexts(0.6)
    seen.add(text(*LINES[:10]))
    copy = seen.copy()
    assert copy.add_new(text(*LINES[10:20]))
    assert seen.add_new(text(*LINES[10:20]))
    assert not copy.add_new(text(*LINES[:10]))


@given(st.lists(st.text(), max_size=8))
def test_no_text_is_new_twice(texts: list[str]) -> None:
    seen = SeenTexts(0.6)
    for each in texts:
        seen.add_new(each)
    assert not any(seen.add_new(each) for each in texts)
