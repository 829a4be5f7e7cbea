"""What /metrics says of prefill and decode workers, beside what they are together."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from midfill.engine.disaggregated.client import DisaggregatedClient
from midfill.engine.process.client import EngineClient

_LABELS = ("role", "worker")

_GAUGES: dict[str, tuple[str, Callable[[EngineClient], float]]] = {
    "worker_up": ("Whether it takes requests.", lambda each: each.state == "ready"),
    "worker_requests_running": ("Answers that hold KV there.", lambda each: each.stats.running),
    "worker_requests_waiting": ("Answers in its queue.", lambda each: each.stats.waiting),
    "worker_kv_slots": ("Its KV slots (tokens) in total.", lambda each: each.stats.slots_total),
    "worker_kv_slots_free": ("Its empty KV slots.", lambda each: each.stats.slots_free),
    "worker_kv_slots_cached": (
        "Its KV slots of the prefix cache that no answer uses.",
        lambda each: each.stats.slots_cached,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineClient], float]]] = {
    "worker_steps": ("Its forward passes.", lambda each: each.stats.steps),
    "worker_busy_seconds": ("Time it spent in steps.", lambda each: each.stats.busy_seconds),
    "worker_computed_tokens": (
        "Tokens that went through its model.",
        lambda each: each.stats.computed_tokens,
    ),
    "worker_generated_tokens": (
        "Tokens that it generated.",
        lambda each: each.stats.generated_tokens,
    ),
    "worker_restarts": ("How often it was restarted.", lambda each: each.restarts),
}
_TRANSFERS: dict[str, tuple[str, Callable[[DisaggregatedClient], float]]] = {
    "kv_transferred_bytes": (
        "KV that went from prefill to decode workers.",
        lambda engine: engine.transferred_bytes,
    ),
    "kv_transfer_seconds": ("Time that this took.", lambda engine: engine.transfer_seconds),
    "resumed_requests": (
        "Requests that went on at another worker after one was lost.",
        lambda engine: engine.resumed,
    ),
}


class WorkerCollector(Collector):
    """Gauges and counters of the workers.

    Args:
        engine: all of them.
    """

    def __init__(self, engine: DisaggregatedClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metrics as of now."""
        for kind, families in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (help, value) in families.items():
                family = kind(f"midfill:{name}", help, labels=_LABELS)
                for role, number, engine in self._engine.workers:
                    family.add_metric([role, str(number)], float(value(engine)))
                yield family
        for name, (help, total) in _TRANSFERS.items():
            yield CounterMetricFamily(f"midfill:{name}", help, value=float(total(self._engine)))
