"""Columns of a line in the code units that client and server have agreed on, and in characters.

LSP counts columns in UTF-16 code units unless both sides prefer UTF-8 or UTF-32. Python counts code
points. Documents may hold lone surrogates, since JSON can express them: they count as one UTF-16
code unit and as three bytes.
"""

import re
from typing import Literal

PositionEncoding = Literal["utf-8", "utf-16", "utf-32"]

_ASTRAL = re.compile("[\U00010000-\U0010ffff]")  # two UTF-16 code units each


def column_to_index(line: str, column: int, encoding: PositionEncoding) -> int:
    """Return the index of the character at a column.

    A column beyond the line's end means its end, one inside a character the character's beginning.

    Args:
        line: the line without its line break.
        column: code units before the place; not negative.
        encoding: what a code unit is.
    """
    if line.isascii() or encoding == "utf-32":
        return min(column, len(line))
    if encoding == "utf-8":
        return _byte_column_to_index(line, column)
    index = column
    for extra, match in enumerate(_ASTRAL.finditer(line)):
        start = match.start() + extra
        if start >= column:
            break
        index = match.start() if column == start + 1 else column - extra - 1
    return min(index, len(line))


def index_to_column(line: str, index: int, encoding: PositionEncoding) -> int:
    """Return the number of code units before a character.

    Args:
        line: the line without its line break.
        index: from 0 to the line's length.
        encoding: what a code unit is.
    """
    if line.isascii() or encoding == "utf-32":
        return index
    if encoding == "utf-8":
        return len(line[:index].encode("utf-8", "surrogatepass"))
    return utf16_length(line[:index])


def utf16_length(text: str) -> int:
    """Return the number of UTF-16 code units of a text."""
    return len(text) if text.isascii() else len(text) + len(_ASTRAL.findall(text))


def _byte_column_to_index(line: str, column: int) -> int:
    encoded = line.encode("utf-8", "surrogatepass")
    end = min(column, len(encoded))
    while 0 < end < len(encoded) and encoded[end] & 0xC0 == 0x80:  # a character goes on there
        end -= 1
    return len(encoded[:end].decode("utf-8", "surrogatepass"))
