"""History: rates, ratios and percentiles of the last seconds, from snapshots of counters."""

from collections.abc import Callable
from itertools import pairwise
from math import inf

from midfill.serving.top.snapshot import Snapshot


class History:
    """The last snapshots of one server.

    Args:
        span: seconds that are remembered, and that rates and percentiles are of.
    """

    def __init__(self, span: float) -> None:
        self._span = span
        self._snapshots: list[Snapshot] = []

    def add(self, snapshot: Snapshot) -> None:
        """Add the newest snapshot; at least one older one is kept, too."""
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and self._snapshots[0].time < snapshot.time - self._span:
            del self._snapshots[0]

    @property
    def last(self) -> Snapshot:
        """The newest snapshot."""
        return self._snapshots[-1]

    def rate(self, name: str, tenant: str | None = None) -> float | None:
        """Return a counter's growth per second; None while there is one snapshot."""
        return self._per_second(lambda snapshot: snapshot.value(name, tenant))

    def response_rate(self, condition: Callable[[str], bool]) -> float | None:
        """Return the HTTP responses per second whose status meets a condition."""
        return self._per_second(
            lambda snapshot: sum(
                count for status, count in snapshot.responses.items() if condition(status)
            )
        )

    def ratio(self, part: str, whole: str, tenant: str | None = None) -> float | None:
        """Return a counter's growth as a share of another's; None if that has not grown."""
        grown = self._growth(lambda snapshot: snapshot.value(whole, tenant))
        if grown <= 0:
            return None
        return self._growth(lambda snapshot: snapshot.value(part, tenant)) / grown

    def percentile(self, name: str, share: float, tenant: str | None = None) -> float | None:
        """Return a percentile of a histogram's new values, interpolated inside its bucket.

        None if there are no new values. What is above the last bound counts as that bound.
        """
        series = [snapshot.cumulative_counts(name, tenant) for snapshot in self._snapshots]
        bounds = list(series[-1])
        counts = [_growth([each.get(bound, 0.0) for each in series]) for bound in bounds]
        if not counts or counts[-1] <= 0:
            return None
        wanted = share * counts[-1]
        place = next(place for place, count in enumerate(counts) if count >= wanted)
        below, above = (bounds[place - 1] if place else 0.0), bounds[place]
        if above == inf:
            return below
        before = counts[place - 1] if place else 0.0
        return below + (wanted - before) / (counts[place] - before) * (above - below)

    def _per_second(self, value: Callable[[Snapshot], float]) -> float | None:
        seconds = self._snapshots[-1].time - self._snapshots[0].time
        return self._growth(value) / seconds if seconds > 0 else None

    def _growth(self, value: Callable[[Snapshot], float]) -> float:
        return _growth([value(snapshot) for snapshot in self._snapshots])


def _growth(values: list[float]) -> float:
    """Return by how much a counter has grown; one that is smaller than before began again at 0."""
    return sum(now if now < before else now - before for before, now in pairwise(values))
