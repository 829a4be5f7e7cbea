"""Open documents: their text as the client last described it, change by change."""

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
PositionEncoding = Literal["utf-8", "utf-16", "utf-32"]

_ASTRAL = re.compile("[\U00010000-\U0010ffff]")  # two UTF-16 code units each

# The line breaks of LSP. str.splitlines knows more, such as form feeds.
_LINE_BREAK = re.compile(r"\r\n|\n|\r")
_SURROGATE = re.compile("[\ud800-\udfff]")


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


class Position(msgspec.Struct, frozen=True):
    """A position in a document as clients write it.

    Attributes:
        line: the line's number, from 0.
        character: number of code units of the agreed encoding before it in its line.
    """

    line: Count
    character: Count


class Range(msgspec.Struct, frozen=True):
    """What is between two positions."""

    start: Position
    end: Position


class Change(msgspec.Struct, frozen=True):
    """One change of a document.

    Attributes:
        text: what is there now.
        range: what it replaces; None replaces the whole document.
    """

    text: str
    range: Range | None = None


@dataclass(frozen=True)
class Document:
    """A document in one state.

    Attributes:
        uri: the client's name for it.
        text: its text.
        encoding: the code units of positions in it.
        revision: number of times that it was changed since it was opened.
        line_starts: indices of its lines' first characters.
    """

    uri: str
    text: str
    encoding: PositionEncoding
    revision: int
    line_starts: tuple[int, ...]

    @classmethod
    def opened(cls, uri: str, text: str, encoding: PositionEncoding) -> "Document":
        """Return a document that was just opened."""
        text = _joined_surrogates(text)
        return cls(uri, text, encoding, 0, (0, *_starts_after_breaks(text, 0, len(text))))

    def line_bounds(self, line: int) -> tuple[int, int]:
        """Return where a line starts and where it ends, before its line break."""
        start = self.line_starts[line]
        last = line + 1 == len(self.line_starts)
        end = len(self.text) if last else self.line_starts[line + 1]
        if not last:
            end -= 2 if self.text.endswith("\r\n", start, end) else 1
        return start, end

    def line_at(self, index: int) -> int:
        """Return the number of the line that an index is in."""
        return bisect_left(self.line_starts, index + 1) - 1

    def index_at(self, position: Position) -> int:
        """Return the index of the character at a position.

        One beyond its line's end means that end, one beyond the last line the document's end.
        """
        if position.line >= len(self.line_starts):
            return len(self.text)
        start, end = self.line_bounds(position.line)
        return start + column_to_index(self.text[start:end], position.character, self.encoding)

    def position_of(self, index: int) -> Position:
        """Return the position of the character at an index, or of the document's end.

        Inside a line break it is the end of the line before.
        """
        line = self.line_at(index)
        start, end = self.line_bounds(line)
        index = min(index, end)
        column = index_to_column(self.text[start:end], index - start, self.encoding)
        return Position(line, column)

    def changed(self, changes: Iterable[Change]) -> "Document":
        """Return the document after changes, each of which refers to the state after the last."""
        document = self
        for change in changes:
            if change.range is None:
                document = Document.opened(self.uri, change.text, self.encoding)
            else:
                ends = (change.range.start, change.range.end)
                start, end = sorted(map(document.index_at, ends))
                document = document._spliced(start, end, change.text)
        return replace(document, revision=self.revision + 1)

    def _spliced(self, start: int, end: int, inserted: str) -> "Document":
        """Return the document with a part replaced; only the lines around it are looked at."""
        text = self.text[:start] + inserted + self.text[end:]
        new_end = start + len(inserted)
        if _has_surrogates(text[max(start - 1, 0) : new_end + 1]):
            # Two halves of a character may have met.
            return Document.opened(self.uri, text, self.encoding)
        # Whether a line starts at an index depends on the characters right before and after it:
        # an edit may join \r and \n, or part them.
        before = max(bisect_left(self.line_starts, start), 1)
        after = bisect_left(self.line_starts, end + 1)
        around = _starts_after_breaks(text, max(start - 1, 0), new_end + 1)
        starts = (
            *self.line_starts[:before],
            *(index for index in around if index <= new_end),
            *(index + new_end - end for index in self.line_starts[after:]),
        )
        return replace(self, text=text, line_starts=starts)


def _starts_after_breaks(text: str, start: int, end: int) -> list[int]:
    """Return where lines begin because of the line breaks that end in text[start:end]."""
    return [match.end() for match in _LINE_BREAK.finditer(text, start, end)]


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and _SURROGATE.search(text) is not None


def _joined_surrogates(text: str) -> str:
    """Return a text in which no character is written as two surrogates."""
    if not _has_surrogates(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
