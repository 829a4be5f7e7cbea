"""Metrics for Prometheus: of requests, of the engine as a whole, of memory and of connections.

The names after ``midfill:`` are vLLM's, so that its dashboards work with the prefix exchanged.
What vLLM has no name for is named in the same style. docs/observability.md lists them.

What a request causes has a label for its tenant: "" without API keys, else the key's name. The
first MAX_TENANTS tenants have a value of their own, all others share one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from midfill.engine.process.aggregate import total_tenants
from midfill.engine.process.outputs import undelivered_outputs
from midfill.engine.request import EngineStats, TenantStats, TierStats
from midfill.infill.document_store import Memory
from midfill.serving.server.served_engine import ServedEngine

MAX_TENANTS = 50  # a tenant's histograms are about two hundred time series
OTHERS = "other"  # the tenants beyond

SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0,
)  # fmt: skip

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MODEL, _TENANT = "model_name", "tenant"


Families = Iterator[GaugeMetricFamily | CounterMetricFamily]
T = TypeVar("T")


def families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    table: Mapping[str, tuple[str, Callable[[T], float]]],
    rows: Sequence[tuple[Sequence[str], T]],
    labels: Sequence[str] = (),
) -> Families:
    """Yield the metrics of a table, each with a value per row.

    Args:
        kind: gauges or counters.
        table: by name, without ``midfill:``, what a metric means, and its value of a row.
        rows: each with the values of ``labels``.
        labels: their names.
    """
    for name, (help, value) in table.items():
        family = kind(f"midfill:{name}", help, labels=labels)
        for values, row in rows:
            family.add_metric(values, float(value(row)))
        yield family


def _used_share(stats: EngineStats) -> float:
    used = stats.slots_total - stats.slots_free - stats.slots_cached
    return used / stats.slots_total if stats.slots_total else 0.0


Numbers = Mapping[str, tuple[str, Callable[[EngineStats], float]]]

_ENGINE_GAUGES: Mapping[str, tuple[str, Callable[[ServedEngine], float]]] = {
    "queued_tokens": (
        "Prompt tokens of requests that wait for their first token.",
        lambda engine: engine.queued_tokens,
    ),
    "undelivered_outputs": (
        "Outputs that wait for clients to read them.",
        lambda _: undelivered_outputs(),
    ),
}
_ENGINE_COUNTERS: Mapping[str, tuple[str, Callable[[ServedEngine], float]]] = {
    "engine_restarts": ("Restarts of the engine process.", lambda engine: engine.restarts),
}
_GAUGES: Numbers = {
    "prefix_cache_nodes": (
        "Runs of tokens that the prefix cache's trees consist of.",
        lambda now: now.cache_nodes,
    ),
    "prefix_cache_index_bytes": (
        "Memory of the prefix cache's trees, without the KV.",
        lambda now: now.cache_index_bytes,
    ),
    "num_requests_background": (
        "Prompts to compute while the engine is idle.",
        lambda now: now.background,
    ),
    "num_requests_loading": (
        "Answers whose KV is on its way to the cache.",
        lambda now: now.loading,
    ),
    "kv_cache_usage_perc": (
        "Share of the KV slots that answers in progress use (1 is all).",
        _used_share,
    ),
    "kv_slots": ("KV slots (tokens) in total.", lambda now: now.slots_total),
    "kv_slots_free": ("Empty KV slots.", lambda now: now.slots_free),
    "kv_slots_cached": (
        "KV slots of the prefix cache that no answer uses.",
        lambda now: now.slots_cached,
    ),
    "kv_slots_pinned": (
        "KV slots kept for programs whose next request is awaited.",
        lambda now: now.slots_pinned,
    ),
}
_COUNTERS: Numbers = {
    "num_preemptions": ("Answers put back into the queue.", lambda now: now.preemptions),
    "computed_tokens": ("Tokens that went through the model.", lambda now: now.computed_tokens),
    "reused_tokens": (
        "Prompt tokens whose KV was taken from elsewhere, not from a prefix.",
        lambda now: now.reused_tokens,
    ),
    "background_tokens": (
        "Of these, tokens of prompts computed in idle time.",
        lambda now: now.background_tokens,
    ),
    "layered_prompts": ("Prompts that prefilled by layers.", lambda now: now.layered_prompts),
    "layered_fallbacks": (
        "Prompts that prefilled in chunks instead, for lack of KV slots.",
        lambda now: now.layered_fallbacks,
    ),
    "listed_pairs": (
        "Products of queries and keys in prompts under sparse prefill.",
        lambda now: now.listed_pairs,
    ),
    "causal_pairs": (
        "Products that dense attention has for the same rows.",
        lambda now: now.causal_pairs,
    ),
    "spec_decode_num_drafts": ("Verified drafts.", lambda now: now.drafts),
    "spec_decode_num_draft_tokens": ("Tokens of drafts.", lambda now: now.draft_tokens),
    "spec_decode_num_accepted_tokens": (
        "Of these, accepted ones.",
        lambda now: now.accepted_tokens,
    ),
    "evicted_tokens": ("Tokens evicted from the prefix cache.", lambda now: now.evicted_tokens),
    "kv_exported_bytes": ("KV that was sent elsewhere.", lambda now: now.exported_bytes),
    "kv_imported_bytes": ("KV that came from elsewhere.", lambda now: now.imported_bytes),
    "steps": ("Forward passes.", lambda now: now.steps),
    "busy_seconds": ("Time spent in steps.", lambda now: now.busy_seconds),
    "forward_seconds": ("Time spent in forward passes.", lambda now: now.forward_seconds),
    "sampling_seconds": ("Time spent choosing tokens.", lambda now: now.sampling_seconds),
}
_STATE_GAUGES: Numbers = {
    "states": ("States in total, beside the KV slots.", lambda now: now.states_total),
    "states_used": ("States of answers in progress.", lambda now: now.states_used),
    "state_snapshots": (
        "States kept as snapshots beside the prefix cache.",
        lambda now: now.state_snapshots,
    ),
}
_STATE_COUNTERS: Numbers = {
    "state_snapshots_reused": (
        "Snapshots that sequences have started from.",
        lambda now: now.snapshots_reused,
    ),
    "state_snapshots_evicted": (
        "Snapshots that gave their place, or went with their tokens.",
        lambda now: now.snapshots_evicted,
    ),
}
_TENANT_GAUGES: Mapping[str, tuple[str, Callable[[TenantStats], float]]] = {
    "num_requests_running": ("Answers that hold KV.", lambda now: now.running),
    "num_requests_waiting": ("Answers in the queue.", lambda now: now.waiting),
}
_TENANT_COUNTERS: Mapping[str, tuple[str, Callable[[TenantStats], float]]] = {
    "prompt_tokens": ("Prompt tokens.", lambda now: now.prompt_tokens),
    "generation_tokens": ("Generated tokens.", lambda now: now.generated_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up.", lambda now: now.prompt_tokens),
    "prefix_cache_hits": ("Prompt tokens found in the cache.", lambda now: now.cached_tokens),
}
_TIER_COUNTERS: Mapping[str, tuple[str, Callable[[TierStats], float]]] = {
    "warm_tier_stored_tokens": (
        "Tokens whose KV was handed to the warm tier.",
        lambda tier: tier.stored_tokens,
    ),
    "warm_tier_loaded_tokens": (
        "Tokens whose KV was loaded from it.",
        lambda tier: tier.loaded_tokens,
    ),
    "warm_tier_rejected_chunks": (
        "Chunks removed since they were damaged.",
        lambda tier: tier.rejected_chunks,
    ),
    "warm_tier_failed_writes": (
        "Chunks that could not be written.",
        lambda tier: tier.failed_writes,
    ),
    "warm_tier_dropped_chunks": (
        "Chunks whose KV was evicted before it was stored.",
        lambda tier: tier.dropped_chunks,
    ),
}


class _Collected(Collector):
    """What a function yields, as prometheus_client wants it."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as of now."""
        return self._collect()


class Metrics:
    """Counts what the server sees; reads the engine's own numbers when scraped.

    Attributes:
        model: the model's name.

    Args:
        model: see above.
        engine: the engine.
        tenants: everybody who may send requests.
    """

    def __init__(self, model: str, engine: ServedEngine, tenants: Sequence[str] = ("",)) -> None:
        self._registry = CollectorRegistry()
        self._labels = TenantLabels(tenants)
        self._engine = _EngineMetrics(model, engine, self._labels)
        self.add(self._engine)
        self.model = model
        self._responses = self._counter(
            "http_requests", "Requests by the HTTP status that they ended with.", "status"
        )
        self._finished = self._counter(
            "request_success", "Answers by how they ended.", "finished_reason"
        )
        names, registry = (_MODEL, _TENANT), self._registry
        self._histograms = {
            name: Histogram(f"midfill:{name}", help, names, buckets=buckets, registry=registry)
            for name, (help, buckets) in _HISTOGRAMS.items()
        }
        # All of them from the start: a time series should begin with 0.
        self._tenants = {label: self._new_tenant(label) for label in self._labels.values}

    def of_tenant(self, tenant: str) -> "TenantMetrics":
        """Return what counts a tenant's requests."""
        label = self._labels.of(tenant)
        if label not in self._tenants:
            self._tenants[label] = self._new_tenant(label)
        return self._tenants[label]

    def response_sent(self, tenant: str | None, status: int) -> None:
        """Count a finished HTTP request; its tenant is None if nobody asked for it."""
        label = "" if tenant is None else self._labels.of(tenant)
        self._responses.labels(self.model, label, str(status)).inc()

    def add(self, collect: Callable[[], Families]) -> None:
        """Render further metrics, too: what ``collect`` yields at each scrape."""
        self._registry.register(_Collected(collect))

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as of now."""
        yield from self._registry.collect()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def sums(self) -> dict[tuple[str, str], float]:
        """Return the engine's metrics, answers and latencies, each summed over its labels.

        They are by name and, in a histogram, upper bound; else "".
        """
        sums: dict[tuple[str, str], float] = defaultdict(float)
        latencies = (self._histograms[name].collect() for name in LATENCIES)
        for family in chain(self._engine(), self._finished.collect(), *latencies):
            for sample in family.samples:
                sums[sample.name, sample.labels.get("le", "")] += sample.value
        return sums

    def _new_tenant(self, label: str) -> "TenantMetrics":
        return TenantMetrics(self._histograms, self._finished, self.model, label)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        names = (_MODEL, _TENANT, label)
        return Counter(f"midfill:{name}", help, names, registry=self._registry)


class MetricsOfModels:
    """The metrics of several models as one page, each sample with its model's name.

    Args:
        read: returns those of the models that there are now.
    """

    def __init__(self, read: Callable[[], Sequence[Metrics]]) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        self._registry.register(_Collected(self._of_models))

    def add(self, collect: Callable[[], Families]) -> None:
        """Render further metrics, too: what ``collect`` yields at each scrape."""
        self._registry.register(_Collected(collect))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def sums(self) -> dict[tuple[str, str], float]:
        """Return ``Metrics.sums``, those of all models added up."""
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for metrics in self._read():
            for key, value in metrics.sums().items():
                sums[key] += value
        return sums

    def _of_models(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for metrics in self._read():
            for family in metrics.collect():
                known = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples += [
                    sample._replace(labels={_MODEL: metrics.model, **sample.labels})
                    for sample in family.samples
                ]
        yield from merged.values()


LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")

_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": (
        "Time from a request's arrival to its first token in seconds.",
        SECONDS,
    ),
    "inter_token_latency_seconds": ("Time between tokens in seconds.", SECONDS),
    "e2e_request_latency_seconds": (
        "Time from a request's arrival to its last token in seconds.",
        SECONDS,
    ),
    "request_queue_time_seconds": ("Time in the queue per prompt in seconds.", SECONDS),
    "request_prefill_time_seconds": (
        "Time from the queue to the first token per prompt in seconds.",
        SECONDS,
    ),
    "request_decode_time_seconds": (
        "Time from the first token to the last per prompt in seconds.",
        SECONDS,
    ),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_computed_prompt_tokens": (
        "Prompt tokens per request that were not in the cache.",
        (0, *_TOKENS),
    ),
    "request_generation_tokens": ("Generated tokens per request.", _TOKENS),
}


class TenantMetrics:
    """Counts the requests of one tenant, or of all that share a label."""

    def __init__(
        self, histograms: Mapping[str, Histogram], finished: Counter, model: str, label: str
    ) -> None:
        self._histograms = {name: each.labels(model, label) for name, each in histograms.items()}
        self._finished = finished
        self._label_values = (model, label)

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first token."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """Record that ``tokens`` tokens of an answer arrived ``seconds`` after the ones before."""
        for _ in range(tokens):
            self._histograms["inter_token_latency_seconds"].observe(seconds / tokens)

    def answer_finished(self, reason: str) -> None:
        """Count an answer that is complete, or that was aborted ("abort")."""
        self._finished.labels(*self._label_values, reason).inc()

    def request_finished(self, seconds: float, prompt: int, cached: int, generated: int) -> None:
        """Record a complete request: its duration and numbers of tokens."""
        self._histograms["e2e_request_latency_seconds"].observe(seconds)
        self._histograms["request_prompt_tokens"].observe(prompt)
        self._histograms["request_computed_prompt_tokens"].observe(prompt - cached)
        self._histograms["request_generation_tokens"].observe(generated)

    def stages_finished(self, queue: float, prefill: float, decode: float) -> None:
        """Record how many seconds a complete prompt was in each stage."""
        self._histograms["request_queue_time_seconds"].observe(queue)
        self._histograms["request_prefill_time_seconds"].observe(prefill)
        self._histograms["request_decode_time_seconds"].observe(decode)


class TenantLabels:
    """The label's value for each tenant: its name, for the first MAX_TENANTS that are seen."""

    def __init__(self, tenants: Sequence[str]) -> None:
        self._named: set[str] = set()
        for tenant in tenants:
            self.of(tenant)
        self.is_single = tuple(tenants) == ("",)

    def of(self, tenant: str) -> str:
        """Return a tenant's value."""
        if len(self._named) < MAX_TENANTS:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHERS

    @property
    def values(self) -> tuple[str, ...]:
        """All values so far."""
        others = (OTHERS,) if len(self._named) == MAX_TENANTS else ()
        return (*sorted(self._named), *others)


class _EngineMetrics:
    """The engine's gauges and counters. All counters but its restarts start again with it."""

    def __init__(self, model: str, engine: ServedEngine, labels: TenantLabels) -> None:
        self._model = model
        self._engine = engine
        self._labels = labels

    def __call__(self) -> Families:
        """Yield the metrics as of now."""
        stats, labels = self._engine.stats, (_MODEL,)
        tenants = [((self._model, label), sums) for label, sums in self._by_label(stats).items()]
        yield from families(GaugeMetricFamily, _TENANT_GAUGES, tenants, (_MODEL, _TENANT))
        yield from families(CounterMetricFamily, _TENANT_COUNTERS, tenants, (_MODEL, _TENANT))
        engine = [((self._model,), self._engine)]
        yield from families(GaugeMetricFamily, _ENGINE_GAUGES, engine, labels)
        yield from families(CounterMetricFamily, _ENGINE_COUNTERS, engine, labels)
        now = [((self._model,), stats)]
        yield from families(GaugeMetricFamily, _GAUGES, now, labels)
        yield from families(CounterMetricFamily, _COUNTERS, now, labels)
        if stats.states_total:
            yield from families(GaugeMetricFamily, _STATE_GAUGES, now, labels)
            yield from families(CounterMetricFamily, _STATE_COUNTERS, now, labels)
        if (tier := stats.warm_tier) is not None:
            rows = [((self._model,), tier)]
            yield from families(CounterMetricFamily, _TIER_COUNTERS, rows, labels)
            yield from self._of_folders(tier)

    def _of_folders(self, tier: TierStats) -> Families:
        folders = (_MODEL, "folder")
        for kind, name, help, values in (
            (GaugeMetricFamily, "bytes", "KV in the warm tier.", tier.used_bytes),
            (GaugeMetricFamily, "capacity_bytes", "Its size.", tier.capacity_bytes),
            (CounterMetricFamily, "loaded_chunks", "Chunks of KV read.", tier.loaded_chunks),
            (
                CounterMetricFamily,
                "evicted_chunks",
                "Chunks removed to make room.",
                tier.evicted_chunks,
            ),
        ):
            rows = [((self._model, folder), value) for folder, value in values.items()]
            yield from families(kind, {f"warm_tier_{name}": (help, float)}, rows, folders)

    def _by_label(self, stats: EngineStats) -> dict[str, TenantStats]:
        """Return the sums over the tenants that share each label."""
        if self._labels.is_single:  # one tenant's numbers are the engine's, which are the newest
            (label,) = self._labels.values
            names = TenantStats.__struct_fields__
            return {label: TenantStats(**{name: getattr(stats, name) for name in names})}
        none = {label: TenantStats() for label in self._labels.values}
        tenants = self._engine.tenants.items()
        return total_tenants([none, *({self._labels.of(name): each} for name, each in tenants)])


_MEMORY: Mapping[str, tuple[str, Callable[[Memory], float]]] = {
    "remembered_bytes": (
        "Memory of what is remembered from request to request.",
        lambda memory: memory.held_bytes,
    ),
    "remembered_bytes_max": ("What that memory may become.", lambda memory: memory.max_bytes),
}


def memory_metrics(memory: Callable[[], Mapping[str, Memory]]) -> Families:
    """Yield how much is remembered as of now; ``memory`` returns it by kind."""
    rows = [((kind,), each) for kind, each in memory().items()]
    yield from families(GaugeMetricFamily, _MEMORY, rows, ("kind",))


@dataclass
class ConnectionCounts:
    """What became of connections; one object counts for all of a server.

    Attributes:
        open: how many there are.
        refused: how many were told that there are too many.
        evicted: how many idle ones were closed for new ones.
        timed_out: how many were closed for sending or reading too slowly.
    """

    open: int = 0
    refused: int = 0
    evicted: int = 0
    timed_out: int = 0

    def metrics(self) -> Families:
        """Yield the counts as of now."""
        yield GaugeMetricFamily("midfill:connections", "Open connections.", value=self.open)
        help = "Connections that the server closed or refused to keep its bounds."
        reasons = {"too_many": self.refused, "idle": self.evicted, "timeout": self.timed_out}
        rows = [((reason,), count) for reason, count in reasons.items()]
        closed = {"connections_closed": (help, float)}
        yield from families(CounterMetricFamily, closed, rows, ("reason",))
