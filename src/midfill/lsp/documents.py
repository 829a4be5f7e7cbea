"""Open documents: their text as the client last described it, change by change."""

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from midfill.lsp.positions import PositionEncoding, column_to_index, index_to_column

# The line breaks of LSP. str.splitlines knows more, such as form feeds.
_LINE_BREAK = re.compile(r"\r\n|\n|\r")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Place:
    """A position in a document as clients write it.

    Attributes:
        line: the line's number, from 0.
        column: number of code units before it in its line.
    """

    line: int
    column: int


@dataclass(frozen=True)
class Change:
    """One change of a document.

    Attributes:
        text: what is there now.
        start, end: what it replaces; None replaces the whole document.
    """

    text: str
    start: Place | None = None
    end: Place | None = None


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

    def index_at(self, place: Place) -> int:
        """Return the index of the character at a place.

        A place beyond its line's end means that end, one beyond the last line the document's end.
        """
        if place.line >= len(self.line_starts):
            return len(self.text)
        start, end = self.line_bounds(place.line)
        return start + column_to_index(self.text[start:end], place.column, self.encoding)

    def place_of(self, index: int) -> Place:
        """Return the place of the character at an index, or of the document's end.

        Inside a line break it is the end of the line before.
        """
        line = self.line_at(index)
        start, end = self.line_bounds(line)
        index = min(index, end)
        return Place(line, index_to_column(self.text[start:end], index - start, self.encoding))

    def changed(self, changes: Iterable[Change]) -> "Document":
        """Return the document after changes, each of which refers to the state after the last."""
        document = self
        for change in changes:
            if change.start is None or change.end is None:
                document = Document.opened(self.uri, change.text, self.encoding)
            else:
                start, end = sorted(
                    (document.index_at(change.start), document.index_at(change.end))
                )
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


class OpenDocuments:
    """The documents that the client has open.

    Attributes:
        encoding: the code units of positions in documents that are opened from now on.
    """

    def __init__(self) -> None:
        self.encoding: PositionEncoding = "utf-16"
        self._documents: dict[str, Document] = {}

    def open(self, uri: str, text: str) -> None:
        """Add a document; one of the same name is replaced."""
        self._documents[uri] = Document.opened(uri, text, self.encoding)

    def change(self, document: Document, changes: Iterable[Change]) -> Document:
        """Change an open document, given in its present state; return its new state."""
        changed = self._documents[document.uri] = document.changed(changes)
        return changed

    def close(self, uri: str) -> None:
        """Forget a document."""
        self._documents.pop(uri, None)

    def get(self, uri: str) -> Document | None:
        """Return a document in its present state; None if it is not open."""
        return self._documents.get(uri)


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
