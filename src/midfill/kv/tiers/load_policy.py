"""Whether KV is loaded or computed: a pure policy, and the rates that it is given."""

from collections.abc import Sequence

_WEIGHT = 0.2
"""Of the newest measurement."""
_PATIENCE, _MIN_PATIENCE = 2.0, 0.05  # times what computing would take; seconds


class MeasuredRate:
    """Units per second, averaged over time so that the latest measurements count most.

    Attributes:
        per_second: None before the first measurement.
    """

    def __init__(self) -> None:
        self.per_second: float | None = None

    def record(self, units: float, seconds: float) -> None:
        """Record that ``units`` took ``seconds``."""
        if units <= 0 or seconds <= 0:
            return
        rate = units / seconds
        if self.per_second is None:
            self.per_second = rate
        else:  # averaged as seconds per unit, so that a stall counts by its length
            self.per_second = 1 / ((1 - _WEIGHT) / self.per_second + _WEIGHT / rate)

    def seconds(self, units: float) -> float | None:
        """Return how long ``units`` will take; None if there is no telling."""
        return None if self.per_second is None else units / self.per_second


def chunks_to_load(
    load_seconds: Sequence[float], compute_seconds: Sequence[float], overhead: float = 0.002
) -> int:
    """Return how many of a prompt's next chunks to load, so that the rest is computed.

    The number that saves most time; 0 if none saves more than ``overhead``.

    Args:
        load_seconds: how long it takes to load each chunk, in order.
        compute_seconds: how long to compute it.
        overhead: seconds that loading anything at all takes.
    """
    best, most, saved = 0, overhead, 0.0
    for count, (load, compute) in enumerate(zip(load_seconds, compute_seconds, strict=True), 1):
        saved += compute - load
        if saved > most:
            best, most = count, saved
    return best


def patience(compute_seconds: float) -> float:
    """Return how many seconds KV may take to come that would take so many to compute."""
    return max(_PATIENCE * compute_seconds, _MIN_PATIENCE)
