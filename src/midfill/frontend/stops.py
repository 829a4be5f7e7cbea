"""StopScanner: finds stop strings in a text that arrives in chunks.

The matcher is the one of Aho and Corasick ("Efficient string matching: an aid to bibliographic
search", 1975). Its state is the longest suffix of the text so far that is a prefix of some stop
string. Exactly this suffix has to be held back until it is known whether the stop string follows.
"""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The automaton for a set of stop strings; immutable, shared by all answers of a request.

    It finds the string that ends first in the text, and of several that end there the longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Build the automaton. Empty strings are ignored."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._matched = [0]  # length of the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def advance(self, state: int, character: str) -> int:
        """Return the state after one more character; 0 is the initial state."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def held(self, state: int) -> int:
        """Return how many characters at the text's end may be the start of a stop string."""
        return self._depth[state]

    def matched(self, state: int) -> int:
        """Return the length of the stop string that the text ends with, or 0."""
        return self._matched[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._depth.append(self._depth[state] + 1)
                self._next.append({})
                self._fallback.append(0)
                self._matched.append(0)
            state = self._next[state][character]
        self._matched[state] = len(stop)

    def _link(self) -> None:
        """Set each state's fallback: its longest proper suffix that is a state as well."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._matched[state] = self._matched[state] or self._matched[self._fallback[state]]
            for character, child in self._next[state].items():
                self._fallback[child] = self.advance(self._fallback[state], character)
                queue.append(child)


class StopScanner:
    """The scanner of one answer: lets text pass that can't be part of a stop string.

    Args:
        stops: the automaton.
        include_stop: let the stop string itself pass as well.

    Attributes:
        stopped: the stop string that was found, or None.
    """

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Add text and return what can be shown now; nothing after a stop string."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        state = self._state
        for end in range(len(self._held) + 1, len(seen) + 1):
            state = self._stops.advance(state, seen[end - 1])
            length = self._stops.matched(state)
            if length:
                self.stopped = seen[end - length : end]
                self._held = ""
                return seen[:end] if self._include_stop else seen[: end - length]
        self._state = state
        shown = len(seen) - self._stops.held(state)
        self._held = seen[shown:]
        return seen[:shown]

    def flush(self) -> str:
        """Return what was held back, once the answer has ended without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
