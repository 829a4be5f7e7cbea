"""Metrics for Prometheus: of requests, of the engine as a whole, of memory and of connections.

The names after ``midfill:`` are vLLM's, so that its dashboards work with the prefix exchanged.
What vLLM has no name for is named in the same style. docs/observability.md lists them.

What a request causes has a label for its tenant: "" without API keys, else the key's name. The
first MAX_TENANTS tenants have a value of their own, all others share one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from midfill.engine.process.outputs import undelivered_outputs
from midfill.engine.request import EngineStats, TenantStats, TierStats
from midfill.infill.document_store import Memory

MAX_TENANTS = 50  # a tenant's histograms are about two hundred time series
OTHERS = "other"  # the tenants beyond

_SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0,
)  # fmt: skip

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MODEL, _TENANT = "model_name", "tenant"


class EngineNumbers(Protocol):
    """What metrics read of the engine; see EngineClient."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def tenants(self) -> Mapping[str, TenantStats]: ...
    @property
    def restarts(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...


class EngineReading(NamedTuple):
    """An engine, and its numbers as of one moment."""

    engine: EngineNumbers
    stats: EngineStats


def _used_share(stats: EngineStats) -> float:
    used = stats.slots_total - stats.slots_free - stats.slots_cached
    return used / stats.slots_total if stats.slots_total else 0.0


GAUGES: dict[str, tuple[str, Callable[[EngineReading], float]]] = {
    "queued_tokens": (
        "Prompt tokens of requests that wait for their first token.",
        lambda now: now.engine.queued_tokens,
    ),
    "undelivered_outputs": (
        "Outputs that wait for clients to read them.",
        lambda _: undelivered_outputs(),
    ),
    "prefix_cache_nodes": (
        "Runs of tokens that the prefix cache's trees consist of.",
        lambda now: now.stats.cache_nodes,
    ),
    "prefix_cache_index_bytes": (
        "Memory of the prefix cache's trees, without the KV.",
        lambda now: now.stats.cache_index_bytes,
    ),
    "num_requests_background": (
        "Prompts to compute while the engine is idle.",
        lambda now: now.stats.background,
    ),
    "num_requests_loading": (
        "Answers whose KV is on its way to the cache.",
        lambda now: now.stats.loading,
    ),
    "kv_cache_usage_perc": (
        "Share of the KV slots that answers in progress use (1 is all).",
        lambda now: _used_share(now.stats),
    ),
    "kv_slots": ("KV slots (tokens) in total.", lambda now: now.stats.slots_total),
    "kv_slots_free": ("Empty KV slots.", lambda now: now.stats.slots_free),
    "kv_slots_cached": (
        "KV slots of the prefix cache that no answer uses.",
        lambda now: now.stats.slots_cached,
    ),
}

COUNTERS: dict[str, tuple[str, Callable[[EngineReading], float]]] = {
    "num_preemptions": (
        "Answers put back into the queue.",
        lambda now: now.stats.preemptions,
    ),
    "computed_tokens": (
        "Tokens that went through the model.",
        lambda now: now.stats.computed_tokens,
    ),
    "reused_tokens": (
        "Prompt tokens whose KV was taken from elsewhere, not from a prefix.",
        lambda now: now.stats.reused_tokens,
    ),
    "background_tokens": (
        "Of these, tokens of prompts computed in idle time.",
        lambda now: now.stats.background_tokens,
    ),
    "layered_prompts": (
        "Prompts that prefilled by layers.",
        lambda now: now.stats.layered_prompts,
    ),
    "layered_fallbacks": (
        "Prompts that prefilled in chunks instead, for lack of KV slots.",
        lambda now: now.stats.layered_fallbacks,
    ),
    "listed_pairs": (
        "Products of queries and keys in prompts under sparse prefill.",
        lambda now: now.stats.listed_pairs,
    ),
    "causal_pairs": (
        "Products that dense attention has for the same rows.",
        lambda now: now.stats.causal_pairs,
    ),
    "spec_decode_num_drafts": ("Verified drafts.", lambda now: now.stats.drafts),
    "spec_decode_num_draft_tokens": ("Tokens of drafts.", lambda now: now.stats.draft_tokens),
    "spec_decode_num_accepted_tokens": (
        "Of these, accepted ones.",
        lambda now: now.stats.accepted_tokens,
    ),
    "evicted_tokens": (
        "Tokens evicted from the prefix cache.",
        lambda now: now.stats.evicted_tokens,
    ),
    "kv_exported_bytes": (
        "KV that was sent elsewhere.",
        lambda now: now.stats.exported_bytes,
    ),
    "kv_imported_bytes": (
        "KV that came from elsewhere.",
        lambda now: now.stats.imported_bytes,
    ),
    "steps": ("Forward passes.", lambda now: now.stats.steps),
    "busy_seconds": ("Time spent in steps.", lambda now: now.stats.busy_seconds),
    "forward_seconds": (
        "Time spent in forward passes.",
        lambda now: now.stats.forward_seconds,
    ),
    "sampling_seconds": (
        "Time spent choosing tokens.",
        lambda now: now.stats.sampling_seconds,
    ),
    "engine_restarts": ("Restarts of the engine process.", lambda now: now.engine.restarts),
}


class Metrics:
    """Counts what the server sees; reads the engine's own numbers when scraped.

    Args:
        model: the model's name.
        engine: the engine.
        tenants: everybody who may send requests.
    """

    def __init__(self, model: str, engine: EngineNumbers, tenants: Sequence[str] = ("",)) -> None:
        self._registry = CollectorRegistry()
        self._labels = TenantLabels(tenants)
        self._registry.register(_EngineCollector(model, engine, self._labels))
        self._families = _Families(self._registry)
        self._responses = self._families.counter(
            "http_requests", "Requests by the HTTP status that they ended with.", "status"
        )
        self._model = model
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
        self._responses.labels(self._model, label, str(status)).inc()

    def add(self, collector: Collector) -> None:
        """Render further metrics, too."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _new_tenant(self, label: str) -> "TenantMetrics":
        return TenantMetrics(self._families, self._model, label)


class TenantMetrics:
    """Counts the requests of one tenant, or of all that share a label."""

    def __init__(self, families: "_Families", model: str, label: str) -> None:
        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return families.histogram(name, help, buckets).labels(model, label)

        self._first_token = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token in seconds.",
            _SECONDS,
        )
        self._between_tokens = histogram(
            "inter_token_latency_seconds", "Time between tokens in seconds.", _SECONDS
        )
        self._whole = histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to its last token in seconds.",
            _SECONDS,
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Time in the queue per prompt in seconds.", _SECONDS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds",
            "Time from the queue to the first token per prompt in seconds.",
            _SECONDS,
        )
        self._decode = histogram(
            "request_decode_time_seconds",
            "Time from the first token to the last per prompt in seconds.",
            _SECONDS,
        )
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._computed = histogram(
            "request_computed_prompt_tokens",
            "Prompt tokens per request that were not in the cache.",
            (0, *_TOKENS),
        )
        self._generation = histogram(
            "request_generation_tokens", "Generated tokens per request.", _TOKENS
        )
        self._finished = families.counter(
            "request_success", "Answers by how they ended.", "finished_reason"
        )
        self._label_values = (model, label)

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """Record that ``tokens`` tokens of an answer arrived ``seconds`` after the ones before."""
        for _ in range(tokens):
            self._between_tokens.observe(seconds / tokens)

    def answer_finished(self, reason: str) -> None:
        """Count an answer that is complete, or that was aborted ("abort")."""
        self._finished.labels(*self._label_values, reason).inc()

    def request_finished(self, seconds: float, prompt: int, cached: int, generated: int) -> None:
        """Record a complete request: its duration and numbers of tokens."""
        self._whole.observe(seconds)
        self._prompt.observe(prompt)
        self._computed.observe(prompt - cached)
        self._generation.observe(generated)

    def stages_finished(self, queue: float, prefill: float, decode: float) -> None:
        """Record how many seconds a complete prompt was in each stage."""
        self._queue.observe(queue)
        self._prefill.observe(prefill)
        self._decode.observe(decode)


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


class _Families:
    """Metrics by name, each created once, with labels for model and tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._histograms: dict[str, Histogram] = {}
        self._counters: dict[str, Counter] = {}

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        """Return a histogram."""
        if name not in self._histograms:
            self._histograms[name] = Histogram(
                f"midfill:{name}", help, [_MODEL, _TENANT], buckets=buckets, registry=self._registry
            )
        return self._histograms[name]

    def counter(self, name: str, help: str, label: str) -> Counter:
        """Return a counter with a label more."""
        if name not in self._counters:
            self._counters[name] = Counter(
                f"midfill:{name}", help, [_MODEL, _TENANT, label], registry=self._registry
            )
        return self._counters[name]


class _EngineCollector(Collector):
    """The engine's gauges and counters. All counters but its restarts start again with it."""

    def __init__(self, model: str, engine: EngineNumbers, labels: TenantLabels) -> None:
        self._model = model
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metrics as of now."""
        yield from self._of_tenants()
        yield from self._of_engine()
        if (tier := self._engine.stats.warm_tier) is not None:
            yield from self._of_warm_tier(tier)

    def _of_warm_tier(self, tier: TierStats) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        by_folder = {
            "bytes": (GaugeMetricFamily, "KV in the warm tier.", tier.used_bytes),
            "capacity_bytes": (GaugeMetricFamily, "Its size.", tier.capacity_bytes),
            "loaded_chunks": (CounterMetricFamily, "Chunks of KV read.", tier.loaded_chunks),
            "evicted_chunks": (
                CounterMetricFamily,
                "Chunks removed to make room.",
                tier.evicted_chunks,
            ),
        }
        for name, (kind, help, values) in by_folder.items():
            family = kind(f"midfill:warm_tier_{name}", help, labels=[_MODEL, "folder"])
            for folder, value in values.items():
                family.add_metric([self._model, folder], value)
            yield family
        counters = {
            "stored_tokens": ("Tokens whose KV was handed to the warm tier.", tier.stored_tokens),
            "loaded_tokens": ("Tokens whose KV was loaded from it.", tier.loaded_tokens),
            "rejected_chunks": ("Chunks removed since they were damaged.", tier.rejected_chunks),
            "failed_writes": ("Chunks that could not be written.", tier.failed_writes),
            "dropped_chunks": (
                "Chunks whose KV was evicted before it was stored.",
                tier.dropped_chunks,
            ),
        }
        for name, (help, value) in counters.items():
            counter = CounterMetricFamily(f"midfill:warm_tier_{name}", help, labels=[_MODEL])
            counter.add_metric([self._model], value)
            yield counter

    def _of_tenants(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        tenants = self._by_label()

        def values(name: str) -> dict[str, int]:
            return {
                label: sum(getattr(stats, name) for stats in each)
                for label, each in tenants.items()
            }

        gauges = {
            "num_requests_running": ("Answers that hold KV.", values("running")),
            "num_requests_waiting": ("Answers in the queue.", values("waiting")),
        }
        prompt_tokens = values("prompt_tokens")
        counters = {
            "prompt_tokens": ("Prompt tokens.", prompt_tokens),
            "generation_tokens": ("Generated tokens.", values("generated_tokens")),
            "prefix_cache_queries": ("Prompt tokens looked up.", prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the cache.", values("cached_tokens")),
        }
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (help, by_label) in families.items():
                family = kind(f"midfill:{name}", help, labels=[_MODEL, _TENANT])
                for label, value in by_label.items():
                    family.add_metric([self._model, label], value)
                yield family

    def _by_label(self) -> dict[str, list[TenantStats]]:
        """Return the numbers of the tenants that share each label."""
        found: dict[str, list[TenantStats]] = {label: [] for label in self._labels.values}
        if self._labels.is_single:  # one tenant's numbers are the engine's, which are the newest
            stats = self._engine.stats
            (only,) = found.values()
            fields = TenantStats.__struct_fields__
            only.append(TenantStats(**{name: getattr(stats, name) for name in fields}))
            return found
        for tenant, tenant_stats in self._engine.tenants.items():
            found.setdefault(self._labels.of(tenant), []).append(tenant_stats)
        return found

    def _of_engine(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = EngineReading(self._engine, self._engine.stats)
        for kind, families in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (help, value) in families.items():
                family = kind(f"midfill:{name}", help, labels=[_MODEL])
                family.add_metric([self._model], float(value(now)))
                yield family


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
