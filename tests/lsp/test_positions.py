"""Columns in UTF-8, UTF-16 and UTF-32 code units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.lsp.positions import (
    PositionEncoding,
    column_to_index,
    index_to_column,
    utf16_length,
)

CODECS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}
ENCODINGS = st.sampled_from(["utf-8", "utf-16", "utf-32"])
# Lone surrogates too: JSON can hold them.
LINES = st.text(st.characters(exclude_characters="\r\n"), max_size=30)


def naive_column(line: str, index: int, encoding: PositionEncoding) -> int:
    codec, size = CODECS[encoding]
    # One by one, so that two lone surrogates are not taken for a character.
    return sum(len(each.encode(codec, "surrogatepass")) // size for each in line[:index])


@given(line=LINES, encoding=ENCODINGS, data=st.data())
def test_columns_count_code_units(
    line: str, encoding: PositionEncoding, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(line)))
    column = index_to_column(line, index, encoding)
    assert column == naive_column(line, index, encoding)
    assert column_to_index(line, column, encoding) == index


@given(line=LINES, column=st.integers(0, 200), encoding=ENCODINGS)
def test_any_column_means_the_last_character_boundary_before_it(
    line: str, column: int, encoding: PositionEncoding
) -> None:
    boundaries = [naive_column(line, index, encoding) for index in range(len(line) + 1)]
    expected = max(index for index, boundary in enumerate(boundaries) if boundary <= column)
    assert column_to_index(line, column, encoding) == expected


@pytest.mark.parametrize(("text", "length"), [("", 0), ("ab", 2), ("é字", 2), ("a𝄞b", 4)])
def test_utf16_lengths(text: str, length: int) -> None:
    assert utf16_length(text) == length
