"""Breaker: when an upstream that fails is spared, and when it is tried again."""

import time
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]
_MAX_FAILURES = 3  # in a row
_MIN_OPEN_SECONDS, _MAX_OPEN_SECONDS = 1.0, 30.0


class Breaker:
    """Spares an upstream that fails, and those who would wait for it.

    After some failures in a row it is *open*: nothing is sent. After a while it is *half open*: one
    request may try. Its success closes the breaker, its failure opens it for twice as long.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._seconds = _MIN_OPEN_SECONDS
        self._opened: float | None = None
        self._trial = False

    @property
    def state(self) -> BreakerState:
        """What it lets pass now."""
        if self._opened is None:
            return "closed"
        return "half-open" if self._clock() - self._opened >= self._seconds else "open"

    @property
    def allows(self) -> bool:
        """Whether a request may be sent."""
        state = self.state
        return state == "closed" or (state == "half-open" and not self._trial)

    @property
    def retry_after(self) -> float:
        """Seconds until a request may be sent; 0 if one may be."""
        if self._opened is None:
            return 0.0
        return max(0.0, self._opened + self._seconds - self._clock())

    def record_sent(self) -> None:
        """Record that a request is being sent: while half open, it is the trial."""
        self._trial = self._opened is not None

    def record_given_up(self) -> None:
        """Record that a request was cancelled, which says nothing."""
        self._trial = False

    def record_success(self) -> None:
        """Record that the upstream has answered."""
        self._failures, self._seconds = 0, _MIN_OPEN_SECONDS
        self._opened, self._trial = None, False

    def record_failure(self) -> None:
        """Record that the upstream could not be reached, or did not answer as it should."""
        self._failures += 1
        if self._opened is not None:
            if not self._trial and self.state == "open":
                return  # sent before it opened
            self._seconds = min(2 * self._seconds, _MAX_OPEN_SECONDS)
        elif self._failures < _MAX_FAILURES:
            return
        self._opened, self._trial = self._clock(), False
