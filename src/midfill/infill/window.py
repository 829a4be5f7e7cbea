"""Windows: how much of a long document goes into a prompt, and where that part begins and ends.

A new window starts at a line with little indentation, so that it tends to begin with a block, and
windows of neighbouring carets with the same one. It ends with the last whole line that is near
enough. Where lines are too long, edges are after a separator if there is one. They never divide a
character, see ``character_boundaries``. ``WindowHistory`` decides when a window has to be placed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from midfill.errors import InvalidRequestError
from midfill.infill.character_boundaries import boundary_before

_LEAST, _MOST = 0.5, 2.0  # of ``before``: a start nearer or farther than this is given up
_NEAR, _FAR = 0.75, 1.25  # of ``before``: where a new start is looked for
_PLACED = 0.6  # of a limit: what a window holds that is placed anew
_LINE = 64  # characters of a line that are looked at
_SEPARATOR = re.compile(r"[\s;,(){}\[\]]")
_CLOSERS = ")]}"


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How much text around the caret goes into a prompt, in characters.

    Attributes:
        before: about how many before the caret. A window is placed with 0.75 to 1.25 times as many
            and kept while it holds half to twice as many; a shorter text is shown whole.
        after: at most how many after the caret.

    Raises:
        InvalidRequestError: no character before the caret, or fewer than none after it.
    """

    before: int = 6000
    after: int = 1500

    def __post_init__(self) -> None:
        for name, value, least in (("before", self.before, 1), ("after", self.after, 0)):
            if value < least:
                raise InvalidRequestError.of_field(
                    f"window.{name}", f"must be at least {least}, not {value}"
                )

    @property
    def whole(self) -> int:
        """A text before the caret of at most this length is shown whole."""
        return int(_FAR * self.before)

    @property
    def nearest(self) -> int:
        """A window whose start is nearer to the caret is given up, unless it begins the text."""
        return int(_LEAST * self.before)

    @property
    def farthest(self) -> int:
        """A window whose start is farther from the caret is given up."""
        return int(_MOST * self.before)

    def limited(self, most: int) -> "WindowRule":
        """Return a rule whose windows hold at most ``most`` characters, with room to grow.

        The text before the caret matters more: what comes after it shrinks to a quarter of the
        window first, and is left alone where it is no more than that.
        """
        size = min(self.before + self.after, int(_PLACED * most))
        after = min(self.after, max(size // 4, size - self.before))
        return WindowRule(max(1, size - after), after)

    def place(self, text: str, caret: int) -> tuple[int, int]:
        """Return start and end of a new window around a caret."""
        start = 0 if caret <= self.whole else place_start(text, caret, self)
        return start, place_end(text, caret, self, len(text))


DEFAULT_WINDOW = WindowRule()
"""For models that don't say what they profit from."""


def place_start(text: str, caret: int, rule: WindowRule) -> int:
    """Return a new start: the line with the least indentation about ``before`` characters back."""
    low, high = max(0, caret - rule.whole), max(0, caret - int(_NEAR * rule.before))
    target = max(0, caret - rule.before)
    lines = [place for place in _line_starts(text, low, high) if not _is_blank(text, place)]
    if lines:
        return min(lines, key=lambda place: (*_depth(text, place), abs(place - target)))
    separators = [found.end() for found in _SEPARATOR.finditer(text, low, high)]
    nearest = min(separators, key=lambda place: abs(place - target), default=target)
    return boundary_before(text, nearest)


def place_end(text: str, caret: int, rule: WindowRule, end: int) -> int:
    """Return a window's end: the last line break within ``after`` characters.

    Args:
        text: what is known of the document.
        caret: the caret's place.
        rule: how much to show.
        end: where the text ends that may be shown.
    """
    limit = caret + rule.after
    if limit >= end:
        return end
    half = caret + rule.after // 2
    line = text.rfind("\n", half, limit) + 1
    if line:
        return line
    separators = [found.end() for found in _SEPARATOR.finditer(text, half, limit)]
    place = boundary_before(text, separators[-1] if separators else limit)
    return max(caret, place)


def _line_starts(text: str, low: int, high: int) -> Iterator[int]:
    """Yield the places from ``low`` to ``high`` where a line starts."""
    if low == 0:
        yield 0
    at = text.find("\n", max(0, low - 1), high)
    while at >= 0:
        yield at + 1
        at = text.find("\n", at + 1, high)


def _is_blank(text: str, place: int) -> bool:
    end = text.find("\n", place, place + _LINE)
    return not text[place : end if end >= 0 else place + _LINE].strip()


def _depth(text: str, place: int) -> tuple[bool, int]:
    """Return how little a line looks like the first of a block: closing, then its indentation."""
    line = text[place : place + _LINE]
    code = line.lstrip()
    return code[:1] in _CLOSERS, len(line) - len(code)
