"""Sums of the numbers of several engines: counters of those that have gone still count."""

from midfill.engine.process.aggregate import total_stats
from midfill.engine.request import EngineStats


def test_gauges_are_of_the_engines_that_there_are_and_counters_of_all() -> None:
    present = EngineStats(
        running=1, slots_total=10, states_total=4, state_snapshots=2, snapshots_reused=3, steps=5
    )
    gone = EngineStats(
        running=2,
        slots_total=20,
        cache_nodes=9,
        cache_index_bytes=90,
        states_total=8,
        states_used=1,
        state_snapshots=6,
        snapshots_reused=4,
        snapshots_evicted=2,
        steps=7,
    )
    assert total_stats([present, present], [gone]) == EngineStats(
        running=2,
        slots_total=20,
        states_total=8,
        state_snapshots=4,
        snapshots_reused=10,
        snapshots_evicted=2,
        steps=17,
    )
