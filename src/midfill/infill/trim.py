"""Trimming: end a completion where it should end, while it arrives.

Each scanner takes a completion in any pieces and passes on what can be shown already. What it has
passed on altogether, once ``finish`` was called, depends on the whole text alone.

The scanners look at characters only and are independent of programming languages. Brackets and
quotes inside strings and comments can mislead them; a cut is then missed.

A model that has filled its hole often goes on and writes what stands after the caret once more. The
*overlap* is the end of the completion that equals the suffix's beginning; it is cut off. Texts are
compared as an editor shows them: line by line, with each line's indentation. Blanks within a line
and the number of blank lines are ignored. What may be an overlap depends on the suffix:

* It begins with a line of its own (the caret's line is blank before the caret, or ends at it).
  Then an overlap begins at a line's start, with the same indentation, and consists of whole lines.
  Only in an answer that was broken off may its single line be incomplete.
* It continues the caret's line. Then an overlap may begin anywhere, and a short one may be a
  coincidence. It counts if it begins with a separator, holds three characters beside brackets, or
  is the whole rest of the line and more than brackets and quotes. A bracket counts if the
  completion closes what it did not open, and the suffix's own bracket would close nothing; a quote
  counts if the completion's quotes are odd.

What is left after that is no completion if it is blank, unless the answer was broken off. A
completion that repeats three lines of 60 characters in all, 200 characters, or the whole suffix
with a further line after it has reached the suffix for certain: it ends there, whatever follows.

Right texts, written by people into holes of lines and blocks, are hardly ever cut (0.1% in Python,
C++, JavaScript and JSON files: mostly the second of two equal lines), and those that run on into
whole lines of the suffix nearly always are; ``tests/infill/test_overlap.py`` measures both.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

Lines = Literal["all", "single", "block"]
Brackets = Literal["keep", "close"]
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_CONTINUING = ("else", "elif", "except", "finally", "catch", "case", "default")
_CONTINUES = re.compile(rf"({'|'.join(_CONTINUING)})\b")
_MAX_SYMBOLS = 200  # of the suffix that are compared; so many repeated are no coincidence
_CERTAIN_LINES, _CERTAIN_SYMBOLS = 3, 60
_CERTAIN_ENDING = 8  # symbols of a suffix that is repeated to its end
_CERTAIN_CHARACTERS = 3  # beside brackets, of an overlap within a line
_CERTAIN_IN_WORD = 8  # symbols of an overlap that begins inside a word of the completion
_MAX_PREFIX = 2000  # characters before the caret in which open brackets are looked for
_OPENERS = {closer: opener for opener, closer in _CLOSERS.items()}
_BRACKETS = "()[]{}"
_QUOTES = "\"'`"
_SEPARATORS = ",;:"
Symbol = tuple[str | None, str]
"""A visible character, and the indentation before it if it is the first of its line."""


class Trimmer:
    """Ends one completion at its line or block, then before its overlap; then closes brackets.

    Args:
        prefix, suffix: the text before and after the caret.
        lines: "single" keeps the first line; "block" ends with the block that the caret is in.
        min_indent: end before the first line that is indented by fewer characters.
        overlap: end where the completion begins to repeat the suffix.
        brackets: "close" closes brackets that the completion leaves open and the suffix does not
            close.

    Attributes:
        done: whether the completion has ended here, whatever follows.
        cut: whether any of it was cut off.
        overlapped: whether it was cut off because it repeats the suffix.
        kept: number of the completion's characters that were passed on.
    """

    def __init__(
        self,
        prefix: str,
        suffix: str,
        *,
        lines: Lines = "all",
        min_indent: int = 0,
        overlap: bool = False,
        brackets: Brackets = "keep",
    ) -> None:
        self.done = False
        self.kept = 0
        self._suffix = suffix
        self._last_line: FirstLineScanner | None = None
        self._lines: list[LineScanner] = []
        if lines != "all":
            self._lines.append(FirstLineScanner() if lines == "single" else BlockScanner(prefix))
        if min_indent:
            self._lines.append(IndentScanner(min_indent))
        self._overlap = OverlapScanner(prefix, suffix) if overlap else None
        self._closes = brackets == "close"
        self._text = ""  # what was kept, if brackets are to be closed

    @property
    def overlapped(self) -> bool:
        """See the attributes."""
        return self._overlap is not None and self._overlap.cut

    @property
    def cut(self) -> bool:
        """See the attributes."""
        return self.overlapped or any(scanner.done for scanner in self._scanners)

    @property
    def ended_at_line_break(self) -> bool:
        """Whether it was cut off where ``end_at_line_break`` asked for it."""
        return self._last_line is not None and self._last_line.done

    def end_at_line_break(self) -> None:
        """Let the completion end at the first line break of what is pushed from now on."""
        self._last_line = self._last_line or FirstLineScanner()

    def push(self, text: str) -> str:
        """Take the next part of the completion; return what can be shown."""
        if self.done:
            return ""
        for scanner in self._scanners:
            text = scanner.push(text)
        if self._overlap is not None:
            text = self._overlap.push(text)
        self._keep(text)
        return text + self.finish() if self.cut else text

    def finish(self, *, broken_off: bool = False) -> str:
        """Return the rest, once the completion has ended.

        Args:
            broken_off: whether the completion is incomplete, because it reached its maximum length.
        """
        if self.done:
            return ""
        self.done = True
        text = ""
        broken_off = broken_off and not self.cut
        for scanner in self._scanners:
            text = scanner.push(text) + scanner.finish()
        if self._overlap is not None:
            text = self._overlap.push(text) + self._overlap.finish(broken_off=broken_off)
        self._keep(text)
        return text + missing_closers(self._text, self._suffix) if self._closes else text

    @property
    def _scanners(self) -> list["LineScanner"]:
        return self._lines if self._last_line is None else [self._last_line, *self._lines]

    def _keep(self, text: str) -> None:
        self.kept += len(text)
        if self._closes:
            self._text += text


class LineScanner(Protocol):
    """Ends a completion by its lines.

    Attributes:
        done: whether the completion has ended.
    """

    done: bool

    def push(self, text: str) -> str:
        """Take the next part of the completion; return what can be shown."""

    def finish(self) -> str:
        """Return what was held back, once the completion has ended."""


class FirstLineScanner:
    """Passes a completion on up to its first line break.

    Attributes:
        done: whether the line has ended.
    """

    def __init__(self) -> None:
        self.done = False
        self._held = ""  # a carriage return that may belong to the line break

    def push(self, text: str) -> str:
        """Take the next part of the completion; return what can be shown."""
        if self.done:
            return ""
        line, line_break, _ = (self._held + text).partition("\n")
        self.done = bool(line_break)
        if self.done:
            self._held = ""
            return line.removesuffix("\r")
        self._held = "\r" if line.endswith("\r") else ""
        return line.removesuffix("\r")

    def finish(self) -> str:
        """Return what was held back, once the completion has ended."""
        return "" if self.done else self._held


class IndentScanner:
    """Passes a completion on up to its first line with too little indentation.

    Blank lines have none to judge by. Blanks before the end are dropped.

    Args:
        least: minimum number of blanks before a line's first visible character. The first line
            continues the caret's and may have any.

    Attributes:
        done: whether such a line was found.
    """

    def __init__(self, least: int) -> None:
        self.done = False
        self._least = least
        self._blanks = ""  # held: a line break, or what may become one, and all blanks after it

    def push(self, text: str) -> str:
        """Take the next part of the completion; return what can be shown."""
        shown = ""
        for char in "" if self.done else text:
            if char in "\r\n" or (self._blanks and char.isspace()):
                self._blanks += char
                continue
            _, line_break, indent = self._blanks.rpartition("\n")
            if line_break and len(indent) < self._least:
                self.done = True
                break
            shown += self._blanks + char
            self._blanks = ""
        return shown

    def finish(self) -> str:
        """Return what was held back, once the completion has ended."""
        return "" if self.done else self._blanks


class BlockScanner:
    """Passes a completion on up to the end of the block that the caret is in.

    The block ends before the first line indented less than the caret's line. After deeper lines, it
    also ends before a line indented as much as the caret's. Then a closing bracket still belongs to
    the block, and so does a line that continues it (``else``). Blanks before its end are dropped.

    Held back are blanks, and the first letters of a line as long as they may be such a word.

    Args:
        prefix: the text before the caret.

    Attributes:
        done: whether the block has ended.
    """

    def __init__(self, prefix: str) -> None:
        self.done = False
        self._base = _indent(prefix[prefix.rfind("\n") + 1 :])
        self._deeper = False
        self._blanks = ""  # held: blanks, line breaks included
        self._word = ""  # held: the first letters of a line
        self._line: Literal["begun", "blank", "continues", "last"] = "begun"

    def push(self, text: str) -> str:
        """Take the next part of the completion; return what can be shown."""
        return "".join(self._push(char) for char in text)

    def finish(self) -> str:
        """Return what was held back, once the completion has ended."""
        if self.done:
            return ""
        if self._line == "continues" and not _CONTINUES.match(self._word):
            self.done = True
        return "" if self.done or self._line == "last" else self._blanks + self._word

    def _push(self, char: str) -> str:
        if self.done:
            return ""
        if self._line == "continues":
            return self._continue_word(char)
        if char == "\n":
            self.done = self._line == "last"
            self._line = "blank"
        if char.isspace():
            self._blanks += char
            return ""
        if self._line == "blank" and not self._begin_line(char):
            return ""
        shown, self._blanks = self._blanks + char, ""
        return shown

    def _begin_line(self, char: str) -> bool:
        """Begin a line with its first visible character; return whether it can be shown at once."""
        indent = _indent(self._blanks[self._blanks.rfind("\n") + 1 :])
        self._line = "begun"
        if indent < self._base:
            self.done = True
        elif indent == self._base and self._deeper:
            if char in _CLOSERS.values():
                self._line = "last"
            else:
                self._line = "continues"
                self._continue_word(char)
                return False
        self._deeper = self._deeper or indent > self._base
        return not self.done

    def _continue_word(self, char: str) -> str:
        """Take a character of a line that is kept only if it begins with a continuing word."""
        self._word += char
        if any(word.startswith(self._word) for word in _CONTINUING):
            return ""
        if not _CONTINUES.match(self._word):
            self.done = True
            return ""
        shown, self._blanks, self._word = self._blanks + self._word[:-1], "", ""
        self._line = "begun"
        return shown + self._push(char)


def first_line(completion: str) -> str:
    """Return the completion up to its first line break."""
    return re.split(r"\r?\n", completion, maxsplit=1)[0]


def missing_closers(completion: str, suffix: str) -> str:
    """Return the brackets that close what is left open and the suffix doesn't close."""
    missing = "".join(_CLOSERS[opener] for opener in reversed(open_brackets(completion)[0]))
    coming = "".join(suffix[:100].split())
    for length in range(len(missing), 0, -1):
        if coming.startswith(missing[len(missing) - length :]):
            return missing[: len(missing) - length]
    return missing


def _indent(line: str) -> int:
    """Return the columns of a line's indentation; tabs stop at multiples of eight."""
    lead = line[: len(line) - len(line.lstrip(" \t"))]
    return len(lead.expandtabs())


@dataclass(slots=True)
class _Match:
    """The last characters of a completion, equal to the suffix's first ones.

    Attributes:
        cut: length of the completion without them, and without blanks that the suffix repeats.
        length: number of symbols.
        in_word: whether it begins inside a word of the completion.
    """

    cut: int
    length: int
    in_word: bool


class OverlapScanner:
    """Passes a completion on up to where it begins to repeat the suffix.

    Held back are the characters that an end of the completion may still cut off: from the first
    place on at which the completion has equalled the suffix ever since, blanks before a place
    where an overlap may begin, and blanks before the first visible character.

    Args:
        prefix, suffix: the text before and after the caret.

    Attributes:
        done: whether the completion has ended, because it repeats the suffix for certain.
        cut: whether anything was cut off.
    """

    def __init__(self, prefix: str, suffix: str) -> None:
        self.done = False
        self.cut = False
        self._prefix = prefix[-_MAX_PREFIX:]
        line = prefix[prefix.rfind("\n") + 1 :]
        self._before = line if not line.strip() else None  # blanks before the caret on its line
        self._leading = suffix[: len(suffix) - len(suffix.lstrip())]
        found = list(islice(_symbols(suffix, self._before), _MAX_SYMBOLS + 1))
        self._ends = len(found) <= _MAX_SYMBOLS  # whether these are all of the suffix's symbols
        self._suffix = [symbol for symbol, _ in found[:_MAX_SYMBOLS]]
        self._places = [place for _, place in found]  # of each in the suffix
        self._inline = bool(self._suffix) and self._suffix[0][0] is None
        self._text = ""  # the completion so far
        self._shown = 0  # characters of it that were passed on
        self._visible = 0  # length of it without blanks at its end
        self._indent = self._before  # of its last line, while that is blank
        self._matches: list[_Match] = []  # longest first

    def push(self, text: str) -> str:
        """Take the next part of the completion; return what can be shown."""
        if self.done:
            return ""
        start = len(self._text)
        self._text += text
        if not self._suffix:
            return self._show(self._without_blanks(len(self._text)))
        for at, char in enumerate(text, start):
            if char in "\r\n":
                self._end_line()
            elif char.isspace():
                self._indent = None if self._indent is None else self._indent + char
            else:
                certain = self._advance((self._indent, char), at)
                if certain is not None:
                    self.done = True
                    return self._end(certain.cut)
                self._indent, self._visible = None, at + 1
        return self._show(self._without_blanks(self._held_from()))

    def finish(self, *, broken_off: bool = False) -> str:
        """Return what was held back and is no overlap, once the completion has ended.

        Args:
            broken_off: whether the completion is incomplete, because it reached its maximum length.
        """
        if self.done:
            return ""
        self.done = True
        within_line = broken_off and self._indent is None
        for match in self._matches:
            if self._repeats(match, within_line=within_line):
                return self._end(match.cut)
        return self._show(len(self._text)) if broken_off else self._end(len(self._text))

    def _end(self, end: int) -> str:
        """Return the rest of a completion that ends at a place."""
        end = self._without_blanks(end)
        self.cut = end < len(self._text)
        return self._show(end)

    def _without_blanks(self, end: int) -> int:
        """Return the end, or 0 if the completion is blank up to there."""
        return end if self._shown or self._text[:end].strip() else 0

    def _show(self, end: int) -> str:
        shown, self._shown = self._text[self._shown : end], end
        return shown

    def _end_line(self) -> None:
        """Take a line break: a match of a line that goes on in the suffix can't grow any more."""
        self._indent = ""
        self._matches = [
            match
            for match in self._matches
            if self._has_line(match) or self._repeats(match, within_line=False)
        ]

    def _advance(self, symbol: Symbol, at: int) -> _Match | None:
        """Take the character at a place; return the match that makes an overlap certain, if any."""
        suffix, survivors = self._suffix, list[_Match]()
        for match in self._matches:
            if symbol[0] is not None and self._certain_before(match, symbol):
                return match
            if match.length < len(suffix) and suffix[match.length] == symbol:
                match.length += 1
                if match.length == _MAX_SYMBOLS:
                    return match
                survivors.append(match)
        self._matches = survivors
        if symbol[1] == suffix[0][1] and (self._inline or symbol == suffix[0]):
            self._start(symbol[1], at)
        return None

    def _certain_before(self, match: _Match, symbol: Symbol) -> bool:
        """Whether a match of whole lines is certain, now that a line begins with ``symbol``."""
        if match.length == len(self._suffix):
            return self._ends and match.length >= _CERTAIN_ENDING
        return (
            self._suffix[match.length] == symbol
            and match.length >= _CERTAIN_SYMBOLS
            and 1 + self._line_starts(match.length) >= _CERTAIN_LINES
        )

    def _start(self, char: str, at: int) -> None:
        """Start a match, unless it begins inside a run of one sign or a word too long for it."""
        before = (self._text[at - 1] if at else self._prefix[-1:]) if self._inline else ""
        if before == char and not _in_word(char) and char not in _BRACKETS:
            return
        in_word = at > 0 and _in_word(before) and _in_word(char)
        if in_word and len(self._suffix) < _CERTAIN_IN_WORD:
            return
        if self._inline or "\n" in self._leading or "\r" in self._leading:
            cut = self._visible if self._leading else at
        else:
            cut = at - len(self._leading)
        self._matches.append(_Match(cut, 1, in_word))

    def _held_from(self) -> int:
        """Return how much of the completion can be shown."""
        if self._matches:
            return self._matches[0].cut
        if not self._leading:
            return len(self._text)
        if self._inline or "\n" in self._leading or "\r" in self._leading:
            return self._visible
        # The suffix begins in mid-indentation: an overlapping line gives up as many blanks.
        indent, expected = self._indent, self._suffix[0][0]
        if indent is None or expected is None or not expected.startswith(indent):
            return len(self._text)
        return len(self._text) - max(0, len(indent) - len(self._before or ""))

    def _repeats(self, match: _Match, *, within_line: bool) -> bool:
        """Return whether a match is the suffix's text, not the completion's, if it ends with it.

        Args:
            match: the match.
            within_line: whether the completion was broken off within a line.
        """
        suffix, length = self._suffix, match.length
        lines = self._has_line(match)
        if not self._inline:
            return lines or (within_line and length >= _CERTAIN_CHARACTERS)
        overlap = "".join(char for _, char in suffix[:length])
        if match.in_word and length < _CERTAIN_IN_WORD:
            return False
        if not (lines or within_line) and self._ends_in_word(match):
            return False
        if overlap[0] in _SEPARATORS:
            return True
        if sum(char not in _BRACKETS for char in overlap) >= _CERTAIN_CHARACTERS:
            return True
        if lines and any(char not in _BRACKETS + _QUOTES for char in overlap):
            return True
        written = self._text[: self._visible]
        if overlap[0] in _QUOTES and written.count(overlap[0]) % 2 == 1:
            return True
        before = open_brackets(self._prefix + written)[0]
        return open_brackets(written)[1] and open_brackets("".join(before) + overlap)[1]

    def _has_line(self, match: _Match) -> bool:
        """Whether a match holds the whole first line of the suffix."""
        length = match.length
        ends_line = length == len(self._suffix) or self._suffix[length][0] is not None
        return ends_line or self._line_starts(length) > 0

    def _ends_in_word(self, match: _Match) -> bool:
        """Whether the suffix goes on within the word at whose character the match ends."""
        last, following = match.length - 1, match.length
        adjacent = self._places[following] == self._places[last] + 1
        return adjacent and _in_word(self._suffix[last][1]) and _in_word(self._suffix[following][1])

    def _line_starts(self, length: int) -> int:
        """Return how many of the suffix's first symbols begin a line, not counting the first."""
        return sum(indent is not None for indent, _ in self._suffix[1:length])


def _symbols(text: str, indent: str | None) -> Iterator[tuple[Symbol, int]]:
    """Yield the visible characters of a text with their places.

    Args:
        text: the text.
        indent: blanks before it on its first line; None if there is other text.
    """
    for place, char in enumerate(text):
        if char in "\r\n":
            indent = ""
        elif char.isspace():
            indent = None if indent is None else indent + char
        else:
            yield (indent, char), place
            indent = None


def _in_word(char: str) -> bool:
    return char == "_" or char.isalnum()


def open_brackets(text: str) -> tuple[list[str], bool]:
    """Return the brackets left open, and whether the text closes one that it did not open."""
    opened: list[str] = []
    foreign = False
    for char in text:
        if char in _OPENERS.values():
            opened.append(char)
        elif char in _OPENERS:
            if opened and opened[-1] == _OPENERS[char]:
                opened.pop()
            else:
                foreign = True
    return opened, foreign
