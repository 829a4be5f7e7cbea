"""StepTimeLimit: chunks of prompts become smaller where a step of the whole budget takes long."""

from collections.abc import Sequence

import pytest
from schedule_states import CacheFacts, decoding, prefilling

from midfill.engine.scheduling.scheduler import RunningSequence, ScheduleState, WaitingSequence
from midfill.engine.scheduling.step_cost import MeasuredStepCost
from midfill.engine.scheduling.step_limit import MIN_ROWS, MIN_STEPS, StepTimeLimit
from midfill.kv.radix_cache import CachedPrefix


def limit(seconds_per_row: float, rows: Sequence[int] = (32, 64, 128)) -> StepTimeLimit:
    """A limit of 0.1 s and 128 rows that has seen steps of this speed, whatever their context."""
    made = StepTimeLimit(0.1, MeasuredStepCost(), 128)
    for count in list(rows) * MIN_STEPS:
        for context in (10, 4000):
            made.record_step(count, context, seconds_per_row * count * (1 + context / 4000))
    return made


def state(
    running: Sequence[RunningSequence] = (),
    waiting: Sequence[WaitingSequence] = (),
    background: Sequence[WaitingSequence] = (),
    cache: CacheFacts | None = None,
) -> ScheduleState:
    view = cache or CacheFacts()
    return ScheduleState(tuple(running), tuple(waiting), 1000, view, tuple(background))


PROMPT = state([prefilling(1, 500)])


def test_fast_steps_are_not_limited() -> None:
    assert limit(0.0005).max_rows(PROMPT) is None


def test_slow_steps_have_as_many_rows_as_fit_the_time() -> None:
    assert limit(0.002).max_rows(PROMPT) == pytest.approx(50, abs=3)


def test_rows_never_fall_below_what_reading_the_weights_is_worth() -> None:
    assert limit(0.02).max_rows(PROMPT) == MIN_ROWS


def test_steps_alone_without_prompts_need_no_limit() -> None:
    assert limit(0.002).max_rows(state([decoding(1)])) is None
    assert limit(0.002).max_rows(state()) is None


def test_the_context_of_the_prompt_that_runs_next_counts() -> None:
    slow = limit(0.0007)
    later = prefilling(1, 8000, computed=4000)
    queued = WaitingSequence(2, 4100)
    cached = CacheFacts({2: CachedPrefix(4000, 0)})
    assert slow.max_rows(PROMPT) is None
    assert slow.max_rows(state([later])) == pytest.approx(71, abs=4)
    assert slow.max_rows(state(waiting=[queued], cache=cached)) == pytest.approx(71, abs=4)
    assert slow.max_rows(state(background=[queued], cache=cached)) == pytest.approx(71, abs=4)
    assert slow.max_rows(state(waiting=[queued])) is None


def test_the_first_steps_are_not_judged() -> None:
    made = StepTimeLimit(0.1, MeasuredStepCost(), 128)
    for _ in range(MIN_STEPS - 1):
        made.record_step(128, 10, 3.0)
        assert made.max_rows(PROMPT) is None
    made.record_step(128, 10, 3.0)
    assert made.max_rows(PROMPT) == MIN_ROWS
