"""What /metrics says of the engine as a whole: a help text and a value for each name."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from midfill.engine.process.outputs import undelivered_outputs
from midfill.engine.request import EngineStats, TenantStats


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
