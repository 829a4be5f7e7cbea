"""What a replica tells of itself every two seconds, as plain values that Serve passes on."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from midfill.engine.request import EngineStats, TenantStats

GAUGES = frozenset(
    {"running", "waiting", "slots_total", "slots_free", "slots_cached", "background", "loading"}
)
"""Fields of ``EngineStats`` that go down again; the others only grow."""

_SUMMED = tuple(
    name
    for name in EngineStats.__struct_fields__
    if isinstance(getattr(EngineStats(), name), int | float)
)


class ReplicaNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        state: of its engine, see ``EngineClient``.
        documents: how many documents it has had requests of.
        queued_tokens: prompt tokens of requests without any output yet.
        restarts: how often its engine was restarted.
        process_id: of its own process.
        stats: its engine's numbers.
        tenants: the same by tenant.
    """

    state: str = "starting"
    documents: int = 0
    queued_tokens: int = 0
    restarts: int = 0
    process_id: int = 0
    stats: EngineStats = EngineStats()
    tenants: dict[str, TenantStats] = {}

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that was found in the cache."""
        return self.stats.cached_tokens / max(1, self.stats.prompt_tokens)

    def plain(self) -> dict[str, Any]:
        """Return them as what JSON can hold."""
        return dict(msgspec.to_builtins(self))


def read_numbers(values: Mapping[str, Any]) -> ReplicaNumbers:
    """Return a replica's numbers; all are 0 before it has told any."""
    return msgspec.convert(values, ReplicaNumbers) if values else ReplicaNumbers()


def total_stats(present: Iterable[EngineStats], past: Iterable[EngineStats]) -> EngineStats:
    """Return sums over replicas, of what can be added.

    Args:
        present: those that are there.
        past: the last numbers of those that have gone, whose counters still count.
    """
    sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
    for stats in present:
        for name in sums:
            sums[name] += getattr(stats, name)
    for stats in past:
        for name in sums.keys() - GAUGES:
            sums[name] += getattr(stats, name)
    return EngineStats(**sums)  # type: ignore[arg-type]


def total_tenants(
    present: Iterable[Mapping[str, TenantStats]], past: Iterable[Mapping[str, TenantStats]]
) -> dict[str, TenantStats]:
    """Return the same sums by tenant."""
    counters = ("prompt_tokens", "cached_tokens", "generated_tokens")
    gauges = ("running", "waiting")
    sums: dict[str, dict[str, int]] = {}
    for fields, groups in (((*gauges, *counters), present), (counters, past)):
        for tenants in groups:
            for name, stats in tenants.items():
                sum_of = sums.setdefault(name, dict.fromkeys((*gauges, *counters), 0))
                for each in fields:
                    sum_of[each] += getattr(stats, each)
    return {name: TenantStats(**values) for name, values in sums.items()}
