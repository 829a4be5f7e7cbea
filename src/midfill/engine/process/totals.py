"""Sums of several engines' numbers."""

from collections.abc import Iterable, Mapping

from midfill.engine.request import EngineStats, TenantStats, TierStats

GAUGES = frozenset(
    {"running", "waiting", "slots_total", "slots_free", "slots_cached", "background", "loading"}
)
"""Fields of ``EngineStats`` that go down again; the others only grow."""

_SUMMED = tuple(
    name
    for name in EngineStats.__struct_fields__
    if isinstance(getattr(EngineStats(), name), int | float)
)


def total_stats(present: Iterable[EngineStats], past: Iterable[EngineStats] = ()) -> EngineStats:
    """Return sums over engines, of what can be added.

    Args:
        present: those that are there.
        past: the last numbers of those that have gone, whose counters still count.
    """
    sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
    tiers: list[TierStats] = []
    for stats in present:
        for name in sums:
            sums[name] += getattr(stats, name)
        if stats.warm_tier is not None:
            tiers.append(stats.warm_tier)
    for stats in past:
        for name in sums.keys() - GAUGES:
            sums[name] += getattr(stats, name)
    tier = _total_tier(tiers) if tiers else None
    return EngineStats(**sums, warm_tier=tier)  # type: ignore[arg-type]


def _total_tier(tiers: Iterable[TierStats]) -> TierStats:
    by_folder: dict[str, dict[str, int]] = {}
    counts: dict[str, int] = {}
    for tier in tiers:
        for name in TierStats.__struct_fields__:
            value = getattr(tier, name)
            if isinstance(value, int):
                counts[name] = counts.get(name, 0) + value
                continue
            sums = by_folder.setdefault(name, {})
            for folder, number in value.items():
                sums[folder] = sums.get(folder, 0) + number
    return TierStats(**by_folder, **counts)  # type: ignore[arg-type]


def total_tenants(
    present: Iterable[Mapping[str, TenantStats]], past: Iterable[Mapping[str, TenantStats]] = ()
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
