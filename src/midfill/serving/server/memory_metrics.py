"""What /metrics says of the memory that grows with what clients send, and of its bounds."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from midfill.infill.document_store import Memory


class MemoryCollector(Collector):
    """Renders what is remembered.

    Args:
        memory: returns it by kind.
    """

    def __init__(self, memory: Callable[[], Mapping[str, Memory]]) -> None:
        self._memory = memory

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics as of now."""
        held = GaugeMetricFamily(
            "midfill:remembered_bytes",
            "Memory of what is remembered from request to request.",
            labels=["kind"],
        )
        bound = GaugeMetricFamily(
            "midfill:remembered_bytes_max", "What that memory may become.", labels=["kind"]
        )
        for kind, memory in self._memory().items():
            held.add_metric([kind], memory.held_bytes)
            bound.add_metric([kind], memory.max_bytes)
        yield held
        yield bound
