"""Trimming: end a completion where it should end, while it arrives.

Each scanner takes a completion in any pieces and passes on what can be shown already. What it has
passed on altogether, once ``finish`` was called, depends on the whole text alone.

The scanners look at characters only and are independent of programming languages. Brackets and
quotes inside strings and comments can mislead them; a cut is then missed.
"""

import re
from typing import Literal, Protocol

from midfill.infill.overlap import OverlapScanner, open_brackets

Lines = Literal["all", "single", "block"]
Brackets = Literal["keep", "close"]

_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_CONTINUING = ("else", "elif", "except", "finally", "catch", "case", "default")
_CONTINUES = re.compile(rf"({'|'.join(_CONTINUING)})\b")


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
