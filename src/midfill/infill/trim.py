"""Trimming: cut a completion where it should end. Every function is pure: text in, text out.

The functions look at characters only and are independent of programming languages. Brackets and
quotes inside strings and comments can mislead them; a cut is then missed.
"""

import re
from typing import Literal

Lines = Literal["all", "single", "block"]
Brackets = Literal["keep", "close"]

_CLOSERS = {")": "(", "]": "[", "}": "{"}
_OPENERS = {opener: closer for closer, opener in _CLOSERS.items()}
_CERTAIN = 3  # an overlap with this many characters beside brackets is no coincidence
_MAX_OVERLAP = 2000  # characters
_CONTINUES = re.compile(r"(else|elif|except|finally|catch|case|default)\b")


def trim(
    completion: str, prefix: str, suffix: str, *, lines: Lines = "all", brackets: Brackets = "keep"
) -> str:
    """Return a completion as it should be inserted, by the functions below in this order.

    Args:
        completion: the text that the model wrote.
        prefix, suffix: text before and after the caret.
        lines: "single" keeps the first line; "block" ends with the block the caret is in.
        brackets: "close" closes brackets that the completion leaves open.
    """
    if lines == "single":
        completion = first_line(completion)
    elif lines == "block":
        completion = block(completion, prefix)
    completion = without_overlap(completion, suffix)
    return with_closed_brackets(completion, suffix) if brackets == "close" else completion


def without_overlap(completion: str, suffix: str) -> str:
    """Return the completion up to where it begins to repeat the suffix.

    The longest end of the completion that is also the suffix's beginning is cut off; whitespace is
    ignored in both. A short overlap like ``)`` could be a coincidence. It is cut off if the
    completion closes something it did not open (the suffix's own ``)`` does that then), or if it
    begins with a separator, which is never repeated.
    """
    places = [place for place, char in enumerate(completion) if not char.isspace()]
    written = "".join(completion.split())[-_MAX_OVERLAP:]
    coming = "".join(suffix[: 4 * _MAX_OVERLAP].split())
    for length in range(min(len(written), len(coming)), 0, -1):
        overlap = coming[:length]
        if written.endswith(overlap) and _repeats(completion, overlap):
            kept = completion[: places[-length]]
            return kept.rstrip() if suffix[:1].isspace() else kept
    return completion


def first_line(completion: str) -> str:
    """Return the completion up to its first line break."""
    return re.split(r"\r?\n", completion, maxsplit=1)[0]


def block(completion: str, prefix: str) -> str:
    """Return the completion up to the end of the block the caret is in.

    The block ends before the first line indented less than the caret's line. After deeper lines, it
    also ends before a line indented as much as the caret's. Then a closing bracket still belongs to
    the block, and so does a line that continues it (``else``). Trailing blank lines are dropped.
    """
    here = prefix[prefix.rfind("\n") + 1 :]
    base = _indent(here)
    lines = completion.splitlines(keepends=True)
    deeper = False
    for number, line in enumerate(lines):
        if number == 0 or not line.strip():
            continue
        indent, text = _indent(line), line.lstrip()
        closes = text[0] in _CLOSERS
        if indent < base or (indent == base and deeper and not (closes or _CONTINUES.match(text))):
            return "".join(lines[:number]).rstrip()
        if indent == base and deeper and closes:
            return "".join(lines[: number + 1]).rstrip()
        deeper = deeper or indent > base
    return completion


def with_closed_brackets(completion: str, suffix: str) -> str:
    """Return the completion with its open brackets closed where the suffix doesn't close them."""
    missing = "".join(_OPENERS[opener] for opener in reversed(_open_brackets(completion)[0]))
    coming = "".join(suffix[:100].split())
    for length in range(len(missing), -1, -1):
        if coming.startswith(missing[len(missing) - length :]):
            return completion + missing[: len(missing) - length]
    return completion


def _repeats(completion: str, overlap: str) -> bool:
    """Return whether an overlap is the suffix's text and not the completion's own."""
    if sum(char not in "()[]{}" for char in overlap) >= _CERTAIN or overlap[0] in ",;:":
        return True
    quoted = overlap[0] in "\"'`" and completion.count(overlap[0]) % 2 == 1
    return quoted or _open_brackets(completion)[1]


def _open_brackets(text: str) -> tuple[list[str], bool]:
    """Return the brackets left open, and whether the text closes one that it did not open."""
    opened: list[str] = []
    foreign = False
    for char in text:
        if char in _OPENERS:
            opened.append(char)
        elif char in _CLOSERS:
            if opened and opened[-1] == _CLOSERS[char]:
                opened.pop()
            else:
                foreign = True
    return opened, foreign


def _indent(line: str) -> int:
    """Return the columns of a line's indentation; tabs stop at multiples of eight."""
    lead = line[: len(line) - len(line.lstrip(" \t"))]
    return len(lead.expandtabs())
