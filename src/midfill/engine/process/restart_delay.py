"""RestartDelay: how long an engine that keeps dying is left alone."""

_MIN_SECONDS = 0.5
_MAX_SECONDS = 5.0


class RestartDelay:
    """Exponential backoff between the processes of one engine.

    One that had answered anything is restarted at once; after one that had not, 0.5 s pass, and
    twice as long after each further one, up to 5 s.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def after_end(self, answered: bool) -> float:
        """Return the seconds to wait, now that a process has ended.

        Args:
            answered: whether it had produced any output.
        """
        self._seconds = 0.0 if answered else min(max(2 * self._seconds, _MIN_SECONDS), _MAX_SECONDS)
        return self._seconds
