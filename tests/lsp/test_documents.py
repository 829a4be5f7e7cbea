"""Documents: text and lines after any changes, as a naive reference has them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.lsp.documents import (
    Change,
    Document,
    Position,
    PositionEncoding,
    Range,
    column_to_index,
    index_to_column,
    utf16_length,
)

ENCODINGS: tuple[PositionEncoding, ...] = ("utf-8", "utf-16", "utf-32")
CODECS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}

# Few characters, so that line breaks meet: all kinds of breaks, what str.splitlines would take for
# one, and characters of every length in UTF-8 and UTF-16.
CHARACTERS = st.sampled_from("ab\n\r\x0c\u2028é字𝄞")
TEXTS = st.text(CHARACTERS, max_size=24)
PLACES = st.builds(Position, st.integers(0, 6), st.integers(0, 12))
CHANGES = st.builds(Change, TEXTS, st.none() | st.builds(Range, PLACES, PLACES))


def naive_lines(text: str) -> list[str]:
    """The lines with their breaks; the last has none."""
    broken = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)", text)
    return [*broken, text[sum(map(len, broken)) :]]


def naive_index(text: str, place: Position, encoding: PositionEncoding) -> int:
    """Walk to the place, character by character."""
    lines = naive_lines(text)
    if place.line >= len(lines):
        return len(text)
    index = sum(map(len, lines[: place.line]))
    codec, size = CODECS[encoding]
    column = 0
    for character in lines[place.line].rstrip("\r\n"):
        column += len(character.encode(codec)) // size
        if column > place.character:
            break
        index += 1
    return index


def naive_change(text: str, change: Change, encoding: PositionEncoding) -> str:
    if change.range is None:
        return change.text
    ends = [naive_index(text, place, encoding) for place in (change.range.start, change.range.end)]
    return text[: min(ends)] + change.text + text[max(ends) :]


@given(text=TEXTS, place=PLACES, encoding=st.sampled_from(ENCODINGS))
def test_any_position_means_the_same_as_in_the_reference(
    text: str, place: Position, encoding: PositionEncoding
) -> None:
    document = Document.opened("file:///a", text, encoding)
    assert document.index_at(place) == naive_index(text, place, encoding)


@given(text=TEXTS, encoding=st.sampled_from(ENCODINGS), data=st.data())
def test_places_lead_back_to_their_index(
    text: str, encoding: PositionEncoding, data: st.DataObject
) -> None:
    document = Document.opened("file:///a", text, encoding)
    index = data.draw(st.integers(0, len(text)))
    found = document.index_at(document.position_of(index))
    inside_a_break = text[index - 1 : index + 1] == "\r\n"
    assert found == index - inside_a_break


@given(text=TEXTS, changes=st.lists(st.lists(CHANGES, max_size=3), max_size=4))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_changes_leave_the_text_and_lines_of_the_reference(
    text: str, changes: list[list[Change]], encoding: PositionEncoding
) -> None:
    document, expected = Document.opened("file:///a", text, encoding), text
    for revision, batch in enumerate(changes, 1):
        document = document.changed(batch)
        for change in batch:
            expected = naive_change(expected, change, encoding)
        assert document.text == expected
        assert document == Document(
            "file:///a", expected, encoding, revision,
            Document.opened("file:///a", expected, encoding).line_starts,
        )  # fmt: skip
        lines = [
            expected[slice(*document.line_bounds(i))] for i in range(len(document.line_starts))
        ]
        assert lines == re.split(r"\r\n|\r|\n", expected)


def test_a_form_feed_breaks_no_line() -> None:
    document = Document.opened("file:///a", "a\x0cb\x85c\u2028d", "utf-16")
    assert document.line_starts == (0,)


@pytest.mark.parametrize(
    ("place", "index"),
    [(Position(0, 99), 2), (Position(7, 0), 6), (Position(1, 2**40), 6), (Position(2**40, 3), 6)],
)
def test_positions_out_of_range_mean_the_nearest_end(place: Position, index: int) -> None:
    assert Document.opened("file:///a", "ab\r\ncd", "utf-16").index_at(place) == index


def test_a_range_written_backwards_means_the_same_text() -> None:
    change = Change("X", Range(Position(0, 3), Position(0, 1)))
    assert Document.opened("file:///a", "abcd", "utf-16").changed([change]).text == "aXd"


def test_halves_of_a_character_that_arrive_one_by_one_are_joined() -> None:
    document = Document.opened("file:///a", "a\ud834", "utf-16")
    document = document.changed([Change("\udd1eb", Range(Position(0, 2), Position(0, 2)))])
    assert document.text == "a𝄞b"
    document = document.changed(
        [
            Change("-", Range(Position(0, 1), Position(0, 1))),
            Change("c", Range(Position(0, 4), Position(0, 5))),
        ]
    )
    assert document.text == "a-𝄞c"
    parted = Document.opened("file:///a", "\ud834x\udd1e", "utf-16")
    assert parted.changed([Change("", Range(Position(0, 1), Position(0, 2)))]).text == "𝄞"


def test_a_change_of_the_whole_document_is_a_revision_of_it() -> None:
    before = Document.opened("file:///a", "one", "utf-16")
    after = before.changed([Change("two")])
    assert (before.text, before.revision, after.text, after.revision) == ("one", 0, "two", 1)


POSITION_ENCODINGS = st.sampled_from(["utf-8", "utf-16", "utf-32"])
# Lone surrogates too: JSON can hold them.
LINES = st.text(st.characters(exclude_characters="\r\n"), max_size=30)


def naive_column(line: str, index: int, encoding: PositionEncoding) -> int:
    codec, size = CODECS[encoding]
    # One by one, so that two lone surrogates are not taken for a character.
    return sum(len(each.encode(codec, "surrogatepass")) // size for each in line[:index])


@given(line=LINES, encoding=POSITION_ENCODINGS, data=st.data())
def test_columns_count_code_units(
    line: str, encoding: PositionEncoding, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(line)))
    column = index_to_column(line, index, encoding)
    assert column == naive_column(line, index, encoding)
    assert column_to_index(line, column, encoding) == index


@given(line=LINES, column=st.integers(0, 200), encoding=POSITION_ENCODINGS)
def test_any_column_means_the_last_character_boundary_before_it(
    line: str, column: int, encoding: PositionEncoding
) -> None:
    boundaries = [naive_column(line, index, encoding) for index in range(len(line) + 1)]
    expected = max(index for index, boundary in enumerate(boundaries) if boundary <= column)
    assert column_to_index(line, column, encoding) == expected


@pytest.mark.parametrize(("text", "length"), [("", 0), ("ab", 2), ("é字", 2), ("a𝄞b", 4)])
def test_utf16_lengths(text: str, length: int) -> None:
    assert utf16_length(text) == length
