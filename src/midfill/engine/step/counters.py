"""EngineCounters: what an engine has done since its start."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from midfill.engine.kv_transfer.warm_cache import KvTraffic
from midfill.engine.request import EngineStats, TenantStats
from midfill.engine.sequences.request_queues import RequestQueues
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.step.speculation import DraftCounts
from midfill.kv.state_pool import StatePool
from midfill.runners.forward.attention import KeyPairs

_log = logging.getLogger(__name__)


@dataclass
class EngineCounters:
    """Counters since the engine's start; ``EngineStats`` documents each."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    forward_seconds: float = 0.0
    sampling_seconds: float = 0.0
    background_tokens: int = 0
    layered_prompts: int = 0
    layered_fallbacks: int = 0

    def record_too_large(self, request_ids: Iterable[str]) -> None:
        """Count prompts that slots were too few for to be prefilled by layers, and log them."""
        for request_id in request_ids:
            self.layered_fallbacks += 1
            _log.info(
                "request %s prefills in chunks: too few KV slots for a prefill by layers beside"
                " what decodes; --kv-memory gives more",
                request_id,
            )

    def stats(
        self,
        queues: RequestQueues,
        drafts: DraftCounts,
        pairs: KeyPairs,
        traffic: KvTraffic,
        slots_pinned: int = 0,
    ) -> EngineStats:
        """Return the counters, with the gauges of an engine's queues and pool as of now."""
        pool = queues.pool
        listed, causal = pairs.totals
        stats = EngineStats(
            running=len(queues.running),
            waiting=len(queues.waiting),
            slots_total=pool.slots.total,
            slots_free=pool.slots.free_slots,
            slots_cached=pool.cache.evictable_tokens,
            slots_pinned=slots_pinned,
            evicted_tokens=pool.cache.evicted_tokens,
            cache_nodes=pool.cache.nodes,
            cache_index_bytes=pool.index_bytes,
            background=len(queues.background),
            drafts=drafts.drafts,
            draft_tokens=drafts.tokens,
            accepted_tokens=drafts.accepted,
            listed_pairs=listed,
            causal_pairs=causal,
            loading=len(queues.loading),
            exported_bytes=traffic.transfers.exported_bytes,
            imported_bytes=traffic.transfers.imported_bytes,
            warm_tier=traffic.tier_stats(),
            **vars(self),
        )
        return stats if pool.states is None else _with_states(stats, pool.states)


def _with_states(stats: EngineStats, states: StatePool) -> EngineStats:
    return msgspec.structs.replace(
        stats,
        states_total=states.store.count,
        states_used=states.used,
        state_snapshots=states.snapshots,
        snapshots_reused=states.reused,
        snapshots_evicted=states.evicted,
    )


@dataclass
class _Counters:
    """Counters of one tenant; ``TenantStats`` documents each."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class TenantCounters:
    """Counters by tenant, from the engine's start. Background requests are not counted."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counters] = {}

    def record_admission(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence that has just been admitted for the first time."""
        counters = self._of(sequence)
        counters.prompt_tokens += sequence.prompt_length
        counters.cached_tokens += sequence.computed

    def record_tokens(self, sequence: Sequence, count: int) -> None:
        """Count generated tokens."""
        self._of(sequence).generated_tokens += count

    def stats(
        self, running: Iterable[Sequence], waiting: Mapping[str, int]
    ) -> dict[str, TenantStats]:
        """Return the numbers of every tenant that has or had a request.

        Args:
            running: the sequences that hold slots.
            waiting: how many of each tenant wait.
        """
        now_running = Counter(sequence.tenant for sequence in running)
        tenants = dict.fromkeys((*self._counters, *waiting))
        none = _Counters()
        return {
            tenant: TenantStats(
                running=now_running[tenant],
                waiting=waiting.get(tenant, 0),
                **vars(counters),
            )
            for tenant in tenants
            for counters in (self._counters.get(tenant, none),)
        }

    def _of(self, sequence: Sequence) -> _Counters:
        counters = self._counters.get(sequence.tenant)
        if counters is None:  # not setdefault, which would make new ones for every token
            counters = self._counters[sequence.tenant] = _Counters()
        return counters
