"""What /metrics says of the upstreams, beside what the server itself counts."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from midfill.serving.gateway.pool import UpstreamPool
from midfill.serving.gateway.prompt_answers import AnswerCounts
from midfill.serving.gateway.upstream import Upstream

_UPSTREAM = "upstream"

_GAUGES: dict[str, tuple[str, Callable[[Upstream], float]]] = {
    "upstream_up": ("Whether requests may be sent to it.", lambda each: each.usable),
    "upstream_requests_running": ("Requests in progress there.", lambda each: each.running),
}
_COUNTERS: dict[str, tuple[str, Callable[[Upstream], float]]] = {
    "upstream_requests": ("Requests sent to it.", lambda each: each.requests),
    "upstream_failures": ("Of these, failed ones.", lambda each: each.failures),
}


class UpstreamCollector(Collector):
    """Gauges and counters of the upstreams.

    Args:
        pool: the upstreams.
        counts: of what went otherwise than hoped.
    """

    def __init__(self, pool: UpstreamPool, counts: AnswerCounts) -> None:
        self._pool = pool
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metrics as of now."""
        for kind, families in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (help, value) in families.items():
                family = kind(f"midfill:{name}", help, labels=[_UPSTREAM])
                for upstream in self._pool.upstreams:
                    family.add_metric([upstream.address], float(value(upstream)))
                yield family
        yield CounterMetricFamily(
            "midfill:upstream_retries",
            "Requests sent to another upstream after one had failed.",
            value=self._counts.retries,
        )
        yield CounterMetricFamily(
            "midfill:answers_asked_again",
            "Answers that did not begin with the half word before the caret.",
            value=self._counts.asked_again,
        )
