"""The last half hour of what the dashboard draws: it has a past when it opens.

Counters and histograms are kept as they were, summed over tenants, and rates and percentiles are
the page's: it computes them of this past as of what it reads itself.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain

import msgspec

from midfill.serving.server.metrics import LATENCIES, SECONDS

INTERVAL = 10.0  # seconds
MAX_SAMPLES = 180  # of half a kilobyte each

_NAMES = (
    "request_success_total", "num_requests_running", "num_requests_waiting",
    "num_requests_background", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "kv_slots", "kv_slots_cached", "kv_cache_usage_perc", "generation_tokens_total",
    "computed_tokens_total", "steps_total", "busy_seconds_total", "states", "states_used",
    "state_snapshots", "state_snapshots_reused_total", "state_snapshots_evicted_total",
)  # fmt: skip
_BOUNDS = (*map(repr, SECONDS), "+Inf")

SERIES = tuple(
    chain(
        ((f"midfill:{name}", "") for name in _NAMES),
        ((f"midfill:{name}_bucket", bound) for name in LATENCIES for bound in _BOUNDS),
    )
)
"""Name and, of a histogram's cumulative counts, upper bound of what is kept."""


class _Series(msgspec.Struct, omit_defaults=True):
    name: str
    le: str = ""


class _Sample(msgspec.Struct):
    age: float
    values: list[float]


class HistoryBody(msgspec.Struct):
    """What the dashboard is sent.

    Attributes:
        series: name and upper bound of each value.
        samples: the oldest first; ``age`` is in seconds.
    """

    series: list[_Series]
    samples: list[_Sample]


class MetricsHistory:
    """Samples of the server's metrics, the last MAX_SAMPLES of them.

    Args:
        read: returns metrics by name and upper bound; what it leaves out is 0.
    """

    def __init__(self, read: Callable[[], Mapping[tuple[str, str], float]]) -> None:
        self._read = read
        self._samples: deque[tuple[float, array[float]]] = deque(maxlen=MAX_SAMPLES)

    def record(self, now: float) -> None:
        """Add a sample, at ``now`` of ``time.monotonic()``."""
        values = self._read()
        self._samples.append((now, array("d", (values.get(key, 0.0) for key in SERIES))))

    async def keep(self) -> None:
        """Add a sample every INTERVAL seconds, until cancelled."""
        while True:
            self.record(time.monotonic())
            await asyncio.sleep(INTERVAL)

    def body(self, now: float) -> HistoryBody:
        """Return all samples with their ages at ``now`` of ``time.monotonic()``."""
        return HistoryBody(
            [_Series(name, bound) for name, bound in SERIES],
            [_Sample(round(now - then, 3), values.tolist()) for then, values in self._samples],
        )
