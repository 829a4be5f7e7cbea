"""Documents: text and lines after any changes, as a naive reference has them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.lsp.documents import Change, Document, OpenDocuments, Place
from midfill.lsp.positions import PositionEncoding

ENCODINGS: tuple[PositionEncoding, ...] = ("utf-8", "utf-16", "utf-32")
CODECS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}

# Few characters, so that line breaks meet: all kinds of breaks, what str.splitlines would take for
# one, and characters of every length in UTF-8 and UTF-16.
CHARACTERS = st.sampled_from("ab\n\r\x0c\u2028é字𝄞")
TEXTS = st.text(CHARACTERS, max_size=24)
PLACES = st.builds(Place, st.integers(0, 6), st.integers(0, 12))
CHANGES = st.builds(Change, TEXTS, st.none() | PLACES, st.none() | PLACES)


def naive_lines(text: str) -> list[str]:
    """The lines with their breaks; the last has none."""
    broken = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)", text)
    return [*broken, text[sum(map(len, broken)) :]]


def naive_index(text: str, place: Place, encoding: PositionEncoding) -> int:
    """Walk to the place, character by character."""
    lines = naive_lines(text)
    if place.line >= len(lines):
        return len(text)
    index = sum(map(len, lines[: place.line]))
    codec, size = CODECS[encoding]
    column = 0
    for character in lines[place.line].rstrip("\r\n"):
        column += len(character.encode(codec)) // size
        if column > place.column:
            break
        index += 1
    return index


def naive_change(text: str, change: Change, encoding: PositionEncoding) -> str:
    if change.start is None or change.end is None:
        return change.text
    ends = [naive_index(text, place, encoding) for place in (change.start, change.end)]
    return text[: min(ends)] + change.text + text[max(ends) :]


@given(text=TEXTS, place=PLACES, encoding=st.sampled_from(ENCODINGS))
def test_any_position_means_the_same_as_in_the_reference(
    text: str, place: Place, encoding: PositionEncoding
) -> None:
    document = Document.opened("file:///a", text, encoding)
    assert document.index_at(place) == naive_index(text, place, encoding)


@given(text=TEXTS, encoding=st.sampled_from(ENCODINGS), data=st.data())
def test_places_lead_back_to_their_index(
    text: str, encoding: PositionEncoding, data: st.DataObject
) -> None:
    document = Document.opened("file:///a", text, encoding)
    index = data.draw(st.integers(0, len(text)))
    found = document.index_at(document.place_of(index))
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
    [(Place(0, 99), 2), (Place(7, 0), 6), (Place(1, 2**40), 6), (Place(2**40, 3), 6)],
)
def test_positions_out_of_range_mean_the_nearest_end(place: Place, index: int) -> None:
    assert Document.opened("file:///a", "ab\r\ncd", "utf-16").index_at(place) == index


def test_a_range_written_backwards_means_the_same_text() -> None:
    change = Change("X", start=Place(0, 3), end=Place(0, 1))
    assert Document.opened("file:///a", "abcd", "utf-16").changed([change]).text == "aXd"


def test_halves_of_a_character_that_arrive_one_by_one_are_joined() -> None:
    document = Document.opened("file:///a", "a\ud834", "utf-16")
    document = document.changed([Change("\udd1eb", Place(0, 2), Place(0, 2))])
    assert document.text == "a𝄞b"
    document = document.changed(
        [Change("-", Place(0, 1), Place(0, 1)), Change("c", Place(0, 4), Place(0, 5))]
    )
    assert document.text == "a-𝄞c"
    parted = Document.opened("file:///a", "\ud834x\udd1e", "utf-16")
    assert parted.changed([Change("", Place(0, 1), Place(0, 2))]).text == "𝄞"


def test_open_documents_are_kept_in_their_present_state() -> None:
    documents = OpenDocuments()
    assert documents.get("file:///a") is None
    documents.open("file:///a", "one")
    before = documents.get("file:///a")
    assert before is not None
    after = documents.change(before, [Change("two")])
    assert documents.get("file:///a") == after
    assert (before.text, before.revision, after.text, after.revision) == ("one", 0, "two", 1)
    documents.close("file:///a")
    documents.close("file:///a")
    assert documents.get("file:///a") is None
