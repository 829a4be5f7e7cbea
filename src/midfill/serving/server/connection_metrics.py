"""What /metrics says of connections."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from midfill.serving.server.connections import ConnectionCounts


class ConnectionCollector(Collector):
    """Renders the counts of a server's connections.

    Args:
        counts: the counts.
    """

    def __init__(self, counts: ConnectionCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metrics as of now."""
        counts = self._counts
        yield GaugeMetricFamily("midfill:connections", "Open connections.", value=counts.open)
        family = CounterMetricFamily(
            "midfill:connections_closed",
            "Connections that the server closed or refused to keep its bounds.",
            labels=["reason"],
        )
        family.add_metric(["too_many"], counts.refused)
        family.add_metric(["idle"], counts.evicted)
        family.add_metric(["timeout"], counts.timed_out)
        yield family
