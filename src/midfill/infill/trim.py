"""Trimming: cutting a completion where it should end. Every function is pure: text in, text out.

They look at characters only and know no programming language; brackets and quotes inside strings
and comments can mislead them, which costs a cut that is not made.
"""

import re
from typing import Literal

Lines = Literal["all", "single", "block"]
Brackets = Literal["keep", "close"]

_CLOSERS = {")": "(", "]": "[", "}": "{"}
_OPENERS = {opener: closer for closer, opener in _CLOSERS.items()}
_CERTAIN = 3  # so many characters that are no brackets make an overlap more than chance
_LONGEST_OVERLAP = 2000
_GOES_ON = re.compile(r"(else|elif|except|finally|catch|case|default)\b")


def trim(
    completion: str, prefix: str, suffix: str, *, lines: Lines = "all", brackets: Brackets = "keep"
) -> str:
    """A completion as it should be inserted: the functions below, in this order.

    Args:
        completion: what the model wrote.
        prefix, suffix: text before and after the caret.
        lines: "single" keeps the first line, "block" ends with the block the caret is in.
        brackets: "close" closes what the completion leaves open.
    """
    if lines == "single":
        completion = first_line(completion)
    elif lines == "block":
        completion = block(completion, prefix)
    completion = without_overlap(completion, suffix)
    return with_closed_brackets(completion, suffix) if brackets == "close" else completion


def without_overlap(completion: str, suffix: str) -> str:
    """The completion up to where it begins to repeat the suffix.

    The longest end of the completion that is the suffix's beginning is cut off, blanks ignored in
    both. A short one like ``)`` could be chance; it is cut off if the completion closes something
    it did not open (so the suffix's own ``)`` does that), or if it begins with a separator, which
    nobody writes twice.
    """
    places = [place for place, char in enumerate(completion) if not char.isspace()]
    written = "".join(completion.split())[-_LONGEST_OVERLAP:]
    coming = "".join(suffix[: 4 * _LONGEST_OVERLAP].split())
    for length in range(min(len(written), len(coming)), 0, -1):
        overlap = coming[:length]
        if written.endswith(overlap) and _repeats(completion, overlap):
            kept = completion[: places[-length]]
            return kept.rstrip() if suffix[:1].isspace() else kept
    return completion


def first_line(completion: str) -> str:
    """The completion up to its first line break."""
    return re.split(r"\r?\n", completion, maxsplit=1)[0]


def block(completion: str, prefix: str) -> str:
    """The completion up to the end of the block the caret is in.

    That is before the first line indented less than the caret's, or, once there were deeper lines,
    as little as the caret's: then a closing bracket still belongs to it, and so does a line that
    goes on with it (``else``). Blank lines at the end are dropped.
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
        if indent < base or (indent == base and deeper and not (closes or _GOES_ON.match(text))):
            return "".join(lines[:number]).rstrip()
        if indent == base and deeper and closes:
            return "".join(lines[: number + 1]).rstrip()
        deeper = deeper or indent > base
    return completion


def with_closed_brackets(completion: str, suffix: str) -> str:
    """The completion with its own open brackets closed, but for those the suffix closes at once."""
    missing = "".join(_OPENERS[opener] for opener in reversed(_open_brackets(completion)[0]))
    coming = "".join(suffix[:100].split())
    for length in range(len(missing), -1, -1):
        if coming.startswith(missing[len(missing) - length :]):
            return completion + missing[: len(missing) - length]
    return completion


def _repeats(completion: str, overlap: str) -> bool:
    """Whether an overlap is the suffix's text rather than the completion's own."""
    if sum(char not in "()[]{}" for char in overlap) >= _CERTAIN or overlap[0] in ",;:":
        return True
    quoted = overlap[0] in "\"'`" and completion.count(overlap[0]) % 2 == 1
    return quoted or _open_brackets(completion)[1]


def _open_brackets(text: str) -> tuple[list[str], bool]:
    """Brackets the text opens and does not close, and whether it closes one it did not open."""
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
    """Columns of a line's indentation; a tab goes to the next multiple of eight."""
    lead = line[: len(line) - len(line.lstrip(" \t"))]
    return len(lead.expandtabs())
