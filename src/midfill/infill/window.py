"""Windows: how much of a long document goes into a prompt, and where that part begins and ends.

A new window starts at a line with little indentation, so that it tends to begin with a block, and
windows of neighbouring carets with the same one. It ends with the last whole line that is near
enough. Where lines are too long, edges are after a separator if there is one. They never divide a
character, see ``cut_places.divides_character``.

``WindowHistory`` decides which window is shown, from the windows shown before. What a window's
edges cost decides where they are:

* The prompt begins with the window's first line. When that line changes, nothing cached matches.
  So a window keeps its start while the caret is between half and twice ``before`` characters away,
  whatever is typed and wherever the caret goes. Only then does the start hop to about ``before``
  characters before the caret. Starts are remembered, so a caret that comes back to another part of
  the document finds the prompts computed there. A start is recognised by its text, so edits above
  it don't matter.
* A hop that is about to come can be prepared in idle time (``expected``); then it costs nothing.
  Without idle time it is put off while text is typed in one place, until the window holds three
  times ``before``: a keystroke should never wait for a hop, a caret that moves waits anyway.
* The suffix begins at the caret. A caret that moves has it computed again whatever its end is, so
  its end needs no memory.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from midfill.errors import InvalidRequestError
from midfill.infill.cut_places import boundary_before
from midfill.infill.view import View

_MIN_SHARE, _MAX_SHARE = 0.5, 2.0  # of ``before``: a start nearer or farther than this is given up
_NEAR, _FAR = 0.75, 1.25  # of ``before``: where a new start is looked for
_PLACED = 0.6  # of a limit: what a window holds that is placed anew
_LINE = 64  # characters of a line that are looked at
_SEPARATOR = re.compile(r"[\s;,(){}\[\]]")
_CLOSERS = ")]}"
_PROBE = 64  # characters that identify a start
_MIN_PROBE = 16  # characters; fewer are only looked for where they should be
_MAX_STARTS = 8
_SOON = 0.8  # of the distance at which a window hops; from here on the hop is worth preparing
_TYPING = 1.5  # times as far, while text is typed in one place


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
        return int(_MIN_SHARE * self.before)

    @property
    def farthest(self) -> int:
        """A window whose start is farther from the caret is given up."""
        return int(_MAX_SHARE * self.before)

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


@dataclass(frozen=True, slots=True)
class ShownText:
    """The part of a document that goes into a prompt.

    Attributes:
        prefix, suffix: the text before and after the caret.
        same_start: whether it begins where the last request's did.
    """

    prefix: str
    suffix: str
    same_start: bool = True


class WindowHistory:
    """The windows of one document."""

    __slots__ = ("_last", "_limit", "_starts")

    def __init__(self) -> None:
        self._starts: list[_Start] = []  # the newest last
        self._limit: int | None = None  # characters, where more did not fit into the context
        self._last: _Placed | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def texts(self) -> Iterator[str]:
        """Yield every text that is held."""
        for start in self._starts:
            yield start.probe
        if self._last is not None:
            yield self._last.suffix

    def choose_and_record(
        self, view: View, rule: WindowRule, limit: int | None = None
    ) -> ShownText:
        """Choose the window of a request, and record it.

        A side of which the client sent no more than the rule allows is shown as the view has it.

        Args:
            view: the document as it is known.
            rule: how much to show.
            limit: maximum number of characters in all, as more have turned out not to fit into the
                context; it holds for later requests, too. None sets no further limit.
        """
        if limit is not None:
            self._limit = limit if self._limit is None else min(limit, self._limit)
        text, caret, most = view.text, view.caret, None
        start, age, end = view.left, 0, view.right
        if self._limit is not None:
            rule = rule.limited(self._limit)
            most = max(rule.before, self._limit - rule.after)
            start = max(start, min(view.sent_left, caret - most))
        if most is not None or view.sent_right - caret > rule.after:
            end = place_end(text, caret, rule, view.sent_right)
        suffix = text[caret:end]
        if caret - view.sent_left > rule.whole:
            farthest = rule.farthest
            if self._last is not None and self._last.suffix == suffix:
                farthest = int(_TYPING * farthest)
            farthest = farthest if most is None else min(most, farthest)
            low = max(min(view.sent_left, view.left), caret - farthest)
            start, age = self._standing(text, low, caret - rule.nearest)
            if start < 0:
                start = place_start(text, caret, rule)
        self._record(text, start, caret)
        self._last = _Placed(start, suffix, min(rule.farthest, most or rule.farthest), rule)
        header = view.header if start == view.left else ""
        return ShownText(header + text[start:caret], suffix, age == 0)

    def expected(self, view: View) -> ShownText | None:
        """Return what the window will show after a hop that is about to come, None before that.

        Args:
            view: as in the last call of ``choose_and_record``.
        """
        last, text, caret = self._last, view.text, view.caret
        if last is None or caret - view.sent_left <= last.rule.whole:
            return None
        if caret - last.start <= _SOON * last.farthest:
            return None
        start = place_start(text, caret, last.rule)
        if start <= last.start:
            return None
        return ShownText(text[start:caret], last.suffix, same_start=False)

    def record_computed(self, view: View, prefix: str) -> None:
        """Record that a prompt is cached whose text before the caret is ``prefix``."""
        probe, last = prefix[:_PROBE], self._last
        if last is None or len(probe) < _MIN_PROBE:
            return
        start = view.text.find(probe, max(0, view.caret - last.rule.farthest), view.caret)
        if start >= 0:
            self._record(view.text, start, view.caret)
            self._last = replace(last, start=start)

    def _standing(self, text: str, low: int, high: int) -> tuple[int, int]:
        """Return the newest start that may stay, and how many are newer; -1 if there is none."""
        for age, start in enumerate(reversed(self._starts)):
            place = start.find(text, low, high)
            if place is not None:
                return place, age
        return -1, len(self._starts)

    def _record(self, text: str, start: int, caret: int) -> None:
        at = min(start, 1)
        probe = text[start - at : min(start + _PROBE, caret)]
        kept = [each for each in self._starts if each.probe != probe]
        self._starts = [*kept, _Start(start, len(text) - start, probe, at)][-_MAX_STARTS:]


@dataclass(frozen=True, slots=True)
class _Placed:
    """The last request's window.

    Attributes:
        start: its place in the text.
        suffix: the text after the caret.
        farthest: characters before the caret with which it hops when the caret moves.
        rule: how much to show.
    """

    start: int
    suffix: str
    farthest: int
    rule: WindowRule


@dataclass(frozen=True, slots=True)
class _Start:
    """A window's start in an earlier version of the text.

    Attributes:
        from_begin, from_end: its distance from the text's ends.
        probe: the character before it, if there is one, and the text after it.
        at: the start's place in the probe, 0 or 1.
    """

    from_begin: int
    from_end: int
    probe: str
    at: int

    def find(self, text: str, low: int, high: int) -> int | None:
        """Return where the start is now, if that is from ``low`` to ``high``."""
        if low > high:
            return None
        for place in (self.from_begin, len(text) - self.from_end):
            if low <= place <= high and text.startswith(self.probe, place - self.at):
                return place
        if len(self.probe) < _MIN_PROBE:
            return None
        found = text.find(self.probe, max(0, low - self.at), high + len(self.probe) - self.at)
        place = found + self.at
        # The start of the whole text has no character before it in the probe.
        begins = found >= 0 and (self.at == 1 or text[place - 1 : place] in ("", "\n"))
        return place if begins else None
