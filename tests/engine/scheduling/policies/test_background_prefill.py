"""BackgroundPrefill as a pure function: background prompts run only where nothing else can."""

from collections.abc import Sequence

import pytest
from schedule_states import CacheFacts

from midfill.engine.scheduling.policies.background_prefill import BackgroundPrefill
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import (
    Chunk,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.kv.radix_cache import CachedPrefix

POLICY = BackgroundPrefill(SarathiServe(token_budget=32), chunk=10, max_waiting=3)


def plan(
    background: Sequence[tuple[int, int]],
    running: tuple[RunningSequence, ...] = (),
    waiting: tuple[WaitingSequence, ...] = (),
    available: int = 1000,
    cache: CacheFacts | None = None,
) -> StepPlan:
    queue = tuple(WaitingSequence(*one) for one in background)
    return POLICY.plan(
        ScheduleState(running, waiting, available, cache or CacheFacts(), background=queue)
    )


def test_the_oldest_prompt_runs_a_chunk_when_idle() -> None:
    assert plan([(1, 50), (2, 50)]) == StepPlan(background=(Chunk(1, 10),))


def test_cached_tokens_need_no_chunk() -> None:
    cache = CacheFacts({1: CachedPrefix(45, 45)})
    assert plan([(1, 50)], cache=cache) == StepPlan(background=(Chunk(1, 5),))


def test_slow_steps_have_smaller_chunks() -> None:
    queue = (WaitingSequence(1, 50),)
    state = ScheduleState((), (), 1000, CacheFacts(), background=queue, max_rows=4)
    assert POLICY.plan(state) == StepPlan(background=(Chunk(1, 4),))


def test_any_other_sequence_goes_first() -> None:
    running = (RunningSequence(0, 20, 19, True),)
    assert plan([(1, 50)], running) == StepPlan(decodes=(0,))
    waiting = (WaitingSequence(0, 20),)
    assert plan([(1, 50)], waiting=waiting) == StepPlan(admit=(Chunk(0, 20),))
    # Even if it can't be admitted.
    assert plan([(1, 50)], waiting=waiting, available=5) == StepPlan()


def test_the_oldest_are_dropped_when_there_are_too_many() -> None:
    five = [(number, 50) for number in range(1, 6)]
    assert plan(five) == StepPlan(drop=(1, 2), background=(Chunk(3, 10),))
    running = (RunningSequence(0, 20, 19, True),)
    assert plan(five, running) == StepPlan(drop=(1, 2), decodes=(0,))


def test_prompts_that_do_not_fit_as_a_whole_are_dropped() -> None:
    cache = CacheFacts({1: CachedPrefix(40, 40), 2: CachedPrefix(40, 10)})
    made = plan([(1, 50), (2, 50)], available=49, cache=cache)
    assert made == StepPlan(drop=(1,), background=(Chunk(2, 10),))
    assert plan([(1, 50)], available=50, cache=cache).drop == ()


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        BackgroundPrefill(SarathiServe(), chunk=0)
