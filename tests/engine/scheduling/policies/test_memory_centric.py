"""MemoryCentric and DecodeHeavyFirst: what BatchLLM promises of its batching and order."""

import random
import statistics

import pytest
from schedule_states import CacheFacts, decoding
from step_simulation import Job, Progress, Simulation

from midfill.engine.scheduling.policies.decode_heavy_first import DecodeHeavyFirst
from midfill.engine.scheduling.policies.memory_centric import MemoryCentric
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import (
    Chunk,
    Hints,
    SchedulerPolicy,
    ScheduleState,
    WaitingSequence,
)
from midfill.kv.radix_cache import CachedPrefix

SLOTS = 1500


def jobs() -> list[Job]:
    """A batch whose answers are of very different lengths; the longest come last."""
    chance = random.Random(2)
    shapes = [(chance.randint(100, 300), 8) for _ in range(60)]
    shapes += [(chance.randint(20, 40), 250) for _ in range(12)]
    return [Job(0.0, length, n, hints=Hints(expected_tokens=n)) for length, n in shapes]


def run(policy: SchedulerPolicy, slots: int = SLOTS) -> tuple[list[Progress], Simulation]:
    simulation = Simulation(policy, slots, max_running=64, lookahead=256)
    return simulation.run(jobs()), simulation


def mixed_share(simulation: Simulation) -> float:
    """Return the share of steps that have decodes and prompt tokens."""
    plans = [plan for _, plan in simulation.plans]
    return statistics.mean(bool(plan.decodes) and bool(plan.chunks or plan.admit) for plan in plans)


def test_fewer_are_preempted_the_larger_the_reserve_and_less_work_is_done_twice() -> None:
    preempted, rows = [], []
    for policy in (
        SarathiServe(64, 64),
        MemoryCentric(64, 64),
        MemoryCentric(64, 64, reserve_steps=128),
    ):
        done, simulation = run(policy, slots=700)
        preempted.append(sum(job.preemptions for job in done))
        rows.append(sum(plan.rows for _, plan in simulation.plans))
        assert simulation.available == 700
    assert preempted[1] < 0.6 * preempted[0]
    assert preempted[2] < 0.5 * preempted[1]
    assert rows == sorted(rows, reverse=True)


def test_the_pool_is_used_up_to_its_share_and_a_step_s_growth() -> None:
    _, simulation = run(MemoryCentric(64, 64, max_used=0.8, reserve_steps=0))
    for state, plan in simulation.plans:
        if plan.admit and state.running:
            new = sum(
                each.length
                for each in state.waiting
                if each.sequence_id in {chunk.sequence_id for chunk in plan.admit}
            )
            assert state.used_slots + new <= 0.8 * SLOTS
    assert simulation.available == SLOTS


def test_long_answers_begin_early_so_that_steps_are_full_until_the_end() -> None:
    plain = MemoryCentric(64, 64)
    _, in_order = run(plain, 4000)
    _, reordered = run(OrderedAdmission(plain, DecodeHeavyFirst()), 4000)
    assert mixed_share(reordered) > 1.5 * mixed_share(in_order)
    rows = [[plan.rows for _, plan in simulation.plans] for simulation in (reordered, in_order)]
    assert statistics.pstdev(rows[0]) < statistics.pstdev(rows[1])
    assert reordered.now < 0.97 * in_order.now


def test_the_ratio_counts_what_is_left_to_compute() -> None:
    queue = (
        WaitingSequence(1, 100, hints=Hints(expected_tokens=50)),
        WaitingSequence(2, 100, hints=Hints(expected_tokens=20)),
        WaitingSequence(3, 100),
    )
    cache = CacheFacts(cached={2: CachedPrefix(90, 0)})
    state = ScheduleState((), queue, 10_000, cache)
    order = DecodeHeavyFirst(expected_tokens=60)
    assert [each.sequence_id for each in order.sort_queue(state)] == [2, 3, 1]


def test_a_request_is_admitted_where_nothing_else_runs() -> None:
    queue = (WaitingSequence(1, 100), WaitingSequence(2, 5))
    alone = ScheduleState((), queue, 100, CacheFacts(), total_slots=100)
    policy = MemoryCentric(128, 8)
    assert policy.plan(alone).admit == (Chunk(1, 100),)
    beside = ScheduleState((decoding(0),), queue, 160, CacheFacts(), total_slots=200)
    assert policy.plan(beside).admit == ()
    assert MemoryCentric(128, 8, reserve_steps=4).plan(beside).admit[0] == Chunk(1, 100)


def test_slow_steps_are_not_cut() -> None:
    state = ScheduleState((), (WaitingSequence(1, 100),), 500, CacheFacts(), max_rows=16)
    assert MemoryCentric(128, 8).plan(state).admit == (Chunk(1, 100),)


@pytest.mark.parametrize("options", [{"max_used": 0.0}, {"max_used": 1.1}, {"reserve_steps": -1}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="max_used must be above 0 and at most 1"):
        MemoryCentric(**options)  # type: ignore[arg-type]


def test_expectations_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="expected_tokens must be at least 1"):
        DecodeHeavyFirst(expected_tokens=0)
