"""Metrics for Prometheus.

The names after ``midfill:`` are vLLM's, so that its dashboards work with the prefix exchanged.
What vLLM has no name for is named in the same style.
"""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from midfill.engine.request import EngineStats

_SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_LABEL = "model_name"


class EngineNumbers(Protocol):
    """What metrics read of the engine; see EngineClient."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def restarts(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...


class Metrics:
    """Counts what the server sees; reads the engine's own numbers when scraped."""

    def __init__(self, model: str, engine: EngineNumbers) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model, engine))
        self._model = model
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time to first token in seconds.", _SECONDS
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "Time between tokens in seconds.", _SECONDS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Time from request to last token in seconds.", _SECONDS
        )
        self._prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKENS
        )
        self._computed = self._histogram(
            "request_computed_prompt_tokens",
            "Prompt tokens per request that were not in the cache.",
            (0, *_TOKENS),
        )
        self._generation = self._histogram(
            "request_generation_tokens", "Generated tokens per request.", _TOKENS
        )
        self._finished = Counter(
            "midfill:request_success", "Answers by how they ended.", [_LABEL, "finished_reason"],
            registry=self._registry,
        )  # fmt: skip

    def first_token(self, seconds: float) -> None:
        """Record the time from a request to its first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """Record that ``tokens`` tokens of an answer arrived ``seconds`` after the ones before."""
        for _ in range(tokens):
            self._between_tokens.observe(seconds / tokens)

    def answer_finished(self, reason: str) -> None:
        """Count an answer that is complete, or that was aborted ("abort")."""
        self._finished.labels(self._model, reason).inc()

    def request_finished(self, seconds: float, prompt: int, cached: int, generated: int) -> None:
        """Record a complete request: its duration and numbers of tokens."""
        self._whole.observe(seconds)
        self._prompt.observe(prompt)
        self._computed.observe(prompt - cached)
        self._generation.observe(generated)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"midfill:{name}", help, [_LABEL], buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model)


class _EngineCollector(Collector):
    """The engine's gauges and counters. All counters but its restarts start again with it."""

    def __init__(self, model: str, engine: EngineNumbers) -> None:
        self._model = model
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._engine.stats
        total = stats.slots_total
        used = total - stats.slots_free - stats.slots_cached
        gauges = {
            "num_requests_running": ("Answers that hold KV.", stats.running),
            "num_requests_waiting": ("Answers in the queue.", stats.waiting),
            "queued_tokens": (
                "Prompt tokens of requests that wait for their first token.",
                self._engine.queued_tokens,
            ),
            "num_requests_background": (
                "Prompts to compute while the engine is idle.",
                stats.background,
            ),
            "kv_cache_usage_perc": (
                "Share of the KV slots that answers in progress use (1 is all).",
                used / total if total else 0.0,
            ),
            "kv_slots": ("KV slots (tokens) in total.", total),
            "kv_slots_free": ("Empty KV slots.", stats.slots_free),
            "kv_slots_cached": (
                "KV slots of the prefix cache that no answer uses.",
                stats.slots_cached,
            ),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens.", stats.prompt_tokens),
            "generation_tokens": ("Generated tokens.", stats.generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up.", stats.prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the cache.", stats.cached_tokens),
            "num_preemptions": ("Answers put back into the queue.", stats.preemptions),
            "computed_tokens": ("Tokens that went through the model.", stats.computed_tokens),
            "background_tokens": (
                "Of these, tokens of prompts computed in idle time.",
                stats.background_tokens,
            ),
            "spec_decode_num_drafts": ("Verified drafts.", stats.drafts),
            "spec_decode_num_draft_tokens": ("Tokens of drafts.", stats.draft_tokens),
            "spec_decode_num_accepted_tokens": (
                "Of these, accepted ones.",
                stats.accepted_tokens,
            ),
            "evicted_tokens": ("Tokens evicted from the prefix cache.", stats.evicted_tokens),
            "steps": ("Forward passes.", stats.steps),
            "busy_seconds": ("Time spent in steps.", stats.busy_seconds),
            "forward_seconds": ("Time spent in forward passes.", stats.forward_seconds),
            "sampling_seconds": ("Time spent choosing tokens.", stats.sampling_seconds),
            "engine_restarts": ("Restarts of the engine process.", self._engine.restarts),
        }
        for name, (help, value) in gauges.items():
            gauge = GaugeMetricFamily(f"midfill:{name}", help, labels=[_LABEL])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (help, value) in counters.items():
            counter = CounterMetricFamily(f"midfill:{name}", help, labels=[_LABEL])
            counter.add_metric([self._model], value)
            yield counter
