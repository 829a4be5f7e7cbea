"""What /metrics says of KV that moves between replicas."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from midfill.serving.cluster.remote_engine import RemoteEngine


class MoveCollector(Collector):
    """Counters of the prompts whose KV another replica had.

    Args:
        engine: the replicas.
    """

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the metrics as of now."""
        counts = self._engine.moves
        family = CounterMetricFamily(
            "midfill:kv_moves",
            "Prompts whose KV another replica had, by what became of it.",
            labels=["result"],
        )
        for result in ("moved", "late", "failed", "declined"):
            family.add_metric([result], getattr(counts, result))
        yield family
        yield CounterMetricFamily(
            "midfill:kv_moved_tokens",
            "Tokens whose KV came from another replica.",
            value=counts.moved_tokens,
        )
