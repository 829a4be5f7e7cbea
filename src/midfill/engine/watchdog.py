"""Watchdog: notices an engine that has work but takes no step."""

_TICKS = 4


class Watchdog:
    """Decides when an engine that has work has been silent for too long.

    Time is counted in ticks and not read from a clock: after the machine slept, or after server and
    engine were stopped together, one tick has passed and the engine still has the others.

    Attributes:
        seconds: how long an engine with work may be silent, at least 3/4 of it.
        tick_seconds: time between two calls of ``tick``.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.tick_seconds = seconds / _TICKS
        self._silent_ticks = 0

    def hear(self) -> None:
        """Note that the engine has sent something."""
        self._silent_ticks = 0

    def tick(self, *, has_work: bool) -> bool:
        """Note that a tick has passed; return whether the engine hangs.

        Args:
            has_work: whether the engine should be taking steps.
        """
        self._silent_ticks = self._silent_ticks + 1 if has_work else 0
        return self._silent_ticks >= _TICKS
