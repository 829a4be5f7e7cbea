"""StepCost: the time of a step by its rows and context, learned from steps that ran."""

from collections.abc import Sequence

import pytest
from schedule_states import CacheFacts, decoding, prefilling

from midfill.engine.scheduling.scheduler import RunningSequence, ScheduleState, WaitingSequence
from midfill.engine.scheduling.step_cost import MIN_ROWS, MIN_STEPS, StepCost, StepTimeLimit
from midfill.kv.radix_cache import CachedPrefix


def learned(
    times: dict[int, float],
    rounds: int = 60,
    *,
    context: float = 10,
    cost: StepCost | None = None,
) -> StepCost:
    cost = cost or StepCost()
    for _ in range(rounds):
        for rows, seconds in times.items():
            cost.observe(rows, context, seconds)
    return cost


def test_it_starts_from_a_guess_and_one_step_sets_the_scale() -> None:
    cost = StepCost()
    shape = [cost.seconds(rows, 10) / cost.seconds(1, 10) for rows in range(1, 200)]
    assert shape == sorted(shape)
    cost.observe(1, 10, 0.012)
    assert cost.seconds(1, 10) == pytest.approx(0.012)
    assert [cost.seconds(rows, 10) / 0.012 for rows in range(1, 200)] == pytest.approx(shape)


def test_observed_times_are_reproduced() -> None:
    times = {1: 0.012, 2: 0.013, 4: 0.019, 8: 0.029, 16: 0.05, 128: 0.3}
    cost = learned(times)
    for rows, seconds in times.items():
        assert cost.seconds(rows, 10) == pytest.approx(seconds, rel=0.01)


def test_times_between_and_beyond_them_are_linear() -> None:
    cost = learned({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5, 32: 4.1, 64: 7.3, 128: 13.7})
    for rows in (3, 6, 7, 11, 25, 100, 200, 500):
        assert cost.seconds(rows, 10) == pytest.approx(0.9 + 0.1 * rows, rel=0.02)


def test_unobserved_numbers_of_rows_follow_in_proportion() -> None:
    cost = learned({1: 0.5})
    guess = StepCost()
    for rows in (2, 5, 8, 128):
        ratio = guess.seconds(rows, 10) / guess.seconds(1, 10)
        assert cost.seconds(rows, 10) == pytest.approx(0.5 * ratio)


def test_an_interrupted_step_changes_little() -> None:
    cost = learned({1: 0.01, 4: 0.02})
    cost.observe(1, 10, 5.0)
    assert cost.seconds(1, 10) < 0.0125


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    cost = learned({1: 0.01, 4: 0.02})
    for _ in range(60):
        cost.observe(1, 10, 0.03)
        cost.observe(4, 10, 0.06)
    assert cost.seconds(1, 10) == pytest.approx(0.03, rel=0.02)
    assert cost.seconds(4, 10) == pytest.approx(0.06, rel=0.02)


def test_long_and_short_contexts_are_learned_separately() -> None:
    short, long = {1: 0.004, 2: 0.0042, 4: 0.005}, {1: 0.008, 2: 0.014, 4: 0.026}
    cost = learned(short, context=100)
    learned(long, context=5000, cost=cost)
    for rows in (1, 2, 4):
        assert cost.seconds(rows, 200) == pytest.approx(short[rows], rel=0.01)
        assert cost.seconds(rows, 6000) == pytest.approx(long[rows], rel=0.01)


def test_an_unobserved_context_is_like_the_nearest_at_the_scale_of_its_first_step() -> None:
    cost = learned({1: 0.004, 2: 0.006}, context=1000)
    assert cost.seconds(2, 9000) == pytest.approx(0.006, rel=0.01)
    cost.observe(1, 9000, 0.012)
    assert cost.seconds(1, 9000) == pytest.approx(0.012)
    assert cost.seconds(2, 9000) == pytest.approx(0.018, rel=0.01)
    assert cost.seconds(2, 1000) == pytest.approx(0.006, rel=0.01)


def test_prefill_of_growing_contexts_does_not_change_the_cost_of_drafts() -> None:
    cost = learned({1: 0.004, 2: 0.005, 128: 0.09})
    before = [cost.seconds(rows, 10) for rows in range(1, 40)]
    for chunk in range(50):
        cost.observe(128, 128 * chunk, 0.09 + 0.002 * chunk)
    cost.observe(1, 6000, 0.01)
    for rows in range(1, 40):
        assert cost.seconds(rows, 10) == pytest.approx(before[rows - 1], rel=0.1)
        assert cost.seconds(rows, 6000) < 5 * cost.seconds(1, 6000) + 0.2


def limit(seconds_per_row: float, rows: Sequence[int] = (32, 64, 128)) -> StepTimeLimit:
    """A limit of 0.1 s and 128 rows that has seen steps of this speed, whatever their context."""
    made = StepTimeLimit(0.1, StepCost(), 128)
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
    made = StepTimeLimit(0.1, StepCost(), 128)
    for _ in range(MIN_STEPS - 1):
        made.record_step(128, 10, 3.0)
        assert made.max_rows(PROMPT) is None
    made.record_step(128, 10, 3.0)
    assert made.max_rows(PROMPT) == MIN_ROWS
