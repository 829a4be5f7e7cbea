"""Watchdog: notices an engine that says nothing for too long."""

import math

_MIN_TICKS = 4
_MAX_TICK_SECONDS = 5.0
_LATE_TICKS = 2


class Watchdog:
    """Decides when an engine has been silent for too long.

    At each tick the engine is asked whether it is there, which it answers between two steps.

    Time is counted in ticks and not read from a clock: after the machine slept, or after server and
    engine were stopped together, one tick has passed and the engine still has the others.

    Args:
        seconds: see the attribute.
        tick_seconds: see the attribute; None takes a quarter of ``seconds``, at most 5.

    Attributes:
        seconds: how long an engine may be silent, at least 3/4 of it; 0 is for ever.
        tick_seconds: time between two calls of ``tick``.
    """

    def __init__(self, seconds: float, tick_seconds: float | None = None) -> None:
        self.seconds = seconds
        self.tick_seconds = tick_seconds or min(seconds / _MIN_TICKS, _MAX_TICK_SECONDS)
        self._max_ticks = math.ceil(seconds / self.tick_seconds) if seconds else 0
        self._silent_ticks = 0

    @property
    def late(self) -> bool:
        """Whether the engine has been silent for longer than a step usually takes."""
        return self._silent_ticks >= _LATE_TICKS

    def hear(self) -> None:
        """Note that the engine has sent something."""
        self._silent_ticks = 0

    def tick(self) -> bool:
        """Note that a tick has passed; return whether the engine hangs."""
        self._silent_ticks += 1
        return self._silent_ticks >= self._max_ticks
