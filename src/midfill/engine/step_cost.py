"""StepCost: how long a step takes, by its rows. Drafts are weighed by it."""

from bisect import bisect_right
from typing import Protocol

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128)
# Where nothing is known yet: on a CPU, each further row costs about a fifth of the first.
_FURTHER_ROW = 0.2
# What an observation moves the estimate by, and how far off it may count: a step that was
# interrupted by other work on the machine says nothing about rows.
_RATE = 0.2
_MOST_OFF = 2.0


class StepCost(Protocol):
    """Estimates a step's time and may learn from steps that ran."""

    def seconds(self, rows: int) -> float:
        """Estimated time of a step of ``rows`` >= 1 rows."""
        ...

    def observe(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` rows took so long."""
        ...


class MeasuredStepCost:
    """Learns from the engine's own steps.

    Times are kept for some numbers of rows, those between are interpolated. A number that was
    never seen follows the others in proportion.
    """

    def __init__(self) -> None:
        self._times = [1.0 + _FURTHER_ROW * (knot - 1) for knot in _KNOTS]
        self._seen = [False] * len(_KNOTS)

    def seconds(self, rows: int) -> float:
        """See ``StepCost.seconds``."""
        lower, share = _place(rows)
        return self._times[lower] + share * (self._times[lower + 1] - self._times[lower])

    def observe(self, rows: int, seconds: float) -> None:
        """See ``StepCost.observe``."""
        ratio = seconds / self.seconds(rows)
        if not any(self._seen):
            self._times = [time * ratio for time in self._times]
            ratio = 1.0
        step = _RATE * (min(max(ratio, 1.0 / _MOST_OFF), _MOST_OFF) - 1.0)
        lower, share = _place(rows)
        weights = {lower: 1.0 - min(share, 1.0), lower + 1: min(share, 1.0)}
        for index in range(len(_KNOTS)):
            weight = weights.get(index, 0.0)
            if weight > 0.0 or not self._seen[index]:
                self._times[index] *= 1.0 + step * (weight if self._seen[index] else 1.0)
            if weight >= 0.5:
                self._seen[index] = True


def _place(rows: int) -> tuple[int, float]:
    """The knot below and how far it is to the next, which exceeds 1 beyond the last one."""
    lower = min(bisect_right(_KNOTS, rows), len(_KNOTS) - 1) - 1
    return lower, (rows - _KNOTS[lower]) / (_KNOTS[lower + 1] - _KNOTS[lower])
