"""StepCost: how long a step takes, by its rows and their context. Drafts are weighed by it."""

from bisect import bisect_left, bisect_right
from typing import Protocol

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128)
# Where nothing is known yet: on a CPU, each further row costs about a fifth of the first.
_FURTHER_ROW = 0.2
# Contexts shorter than this are all alike; attention's share of a step is small.
_SHORT_CONTEXT = 256
# What an observation moves the estimate by, and how far off it may count: a step that was
# interrupted by other work on the machine says nothing about rows.
_RATE = 0.2
_MOST_OFF = 2.0

_Times = dict[int, float]  # seconds by rows, of some knots


class StepCost(Protocol):
    """Estimates a step's time and may learn from steps that ran.

    ``context`` is how many tokens a row attends to, on average.
    """

    def seconds(self, rows: int, context: float) -> float:
        """Estimated time of a step of ``rows`` >= 1 rows."""
        ...

    def observe(self, rows: int, context: float, seconds: float) -> None:
        """A step took so long."""
        ...


class MeasuredStepCost:
    """Learns from the engine's own steps.

    For contexts of about the same length (up to a factor of two) times are kept for some numbers of
    rows; those between are interpolated, those never seen follow the next ones in proportion.
    Contexts of a length never seen are like the nearest that were.
    """

    def __init__(self) -> None:
        self._by_context: dict[int, _Times] = {}

    def seconds(self, rows: int, context: float) -> float:
        """See ``StepCost.seconds``."""
        return _estimate(self._nearest(_class_of(context)), rows)

    def observe(self, rows: int, context: float, seconds: float) -> None:
        """See ``StepCost.observe``."""
        place = _class_of(context)
        times = self._nearest(place)
        ratio = seconds / _estimate(times, rows)
        if place not in self._by_context:
            # The first of its kind sets the scale.
            times = {knot: time * ratio for knot, time in times.items()}
            self._by_context[place] = times
            off = 0.0 if times else ratio - 1.0
        else:
            off = min(max(ratio, 1.0 / _MOST_OFF), _MOST_OFF) - 1.0
        lower, share = _place(rows)
        for knot, weight in ((lower, 1.0 - min(share, 1.0)), (_next(lower), min(share, 1.0))):
            if knot in times:
                times[knot] *= 1.0 + _RATE * weight * off
            elif weight >= 0.5:
                times[knot] = _at(times, knot) * (1.0 + off)

    def _nearest(self, place: int) -> _Times:
        """Times of the contexts most like these; empty where none were seen at all."""
        known = min(self._by_context, key=lambda other: (abs(other - place), other), default=None)
        return {} if known is None else self._by_context[known]


def _class_of(context: float) -> int:
    """Contexts of one class differ by less than a factor of two, or are all short."""
    return max(0, (int(context) // _SHORT_CONTEXT).bit_length())


def _place(rows: int) -> tuple[int, float]:
    """The knot below and how far it is to the next, which exceeds 1 beyond the last one."""
    lower = _KNOTS[min(bisect_right(_KNOTS, rows), len(_KNOTS) - 1) - 1]
    return lower, (rows - lower) / (_next(lower) - lower)


def _next(knot: int) -> int:
    return _KNOTS[_KNOTS.index(knot) + 1]


def _estimate(times: _Times, rows: int) -> float:
    lower, share = _place(rows)
    at_lower = _at(times, lower)
    return at_lower + share * (_at(times, _next(lower)) - at_lower)


def _at(times: _Times, knot: int) -> float:
    """Time of a knot: seen, between two that were, or in proportion to one."""
    if knot in times:
        return times[knot]
    seen = sorted(times)
    above = bisect_left(seen, knot)
    if 0 < above < len(seen):
        lower, upper = seen[above - 1], seen[above]
        share = (knot - lower) / (upper - lower)
        return times[lower] + share * (times[upper] - times[lower])
    if not seen:
        return _guess(knot)
    nearest = seen[min(above, len(seen) - 1)]
    return times[nearest] * _guess(knot) / _guess(nearest)


def _guess(rows: int) -> float:
    return 1.0 + _FURTHER_ROW * (rows - 1)
