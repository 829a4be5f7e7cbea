"""StepCost: the time of a step by its rows and context, learned from steps that ran."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding, prefilling

from midfill.engine.scheduling.scheduler import RunningSequence, ScheduleState, WaitingSequence
from midfill.engine.scheduling.step_cost import (
    MIN_ROWS,
    MIN_STEPS,
    StepCost,
    StepEstimate,
    StepTimeLimit,
    estimate_steps,
    max_rows_within,
)
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
    assert limit(0.0005).inform(PROMPT).max_rows is None


def test_slow_steps_have_as_many_rows_as_fit_the_time() -> None:
    assert limit(0.002).inform(PROMPT).max_rows == pytest.approx(50, abs=3)


def test_rows_never_fall_below_what_reading_the_weights_is_worth() -> None:
    assert limit(0.02).inform(PROMPT).max_rows == MIN_ROWS


def test_steps_alone_without_prompts_need_no_limit() -> None:
    assert limit(0.002).inform(state([decoding(1)])).max_rows is None
    assert limit(0.002).inform(state()).max_rows is None


def reading(seconds: float) -> StepTimeLimit:
    """A limit of 0.1 s that has seen steps which read weights so long, and 1 ms per row."""
    made = StepTimeLimit(0.1, StepCost(), 128)
    for rows in [16, 32, 64, 128] * 2 * MIN_STEPS:
        made.record_step(rows, 10, seconds + 0.001 * rows)
    return made


def test_the_longer_nobody_else_has_asked_the_longer_a_step_may_take() -> None:
    slow = reading(0.08)
    rows = [slow.inform(replace(PROMPT, now=quiet)).max_rows for quiet in (0.0, 0.4, 0.6, 9.0)]
    assert rows[0] == rows[1] == pytest.approx(20, abs=2)
    assert rows[2] == pytest.approx(60, abs=4)
    assert rows[3] == pytest.approx(103, abs=4), "more would make a row hardly cheaper"


def test_a_step_takes_no_longer_where_that_makes_no_row_cheaper() -> None:
    assert reading(0.0).inform(replace(PROMPT, now=9.0)).max_rows == pytest.approx(100, abs=3)


def test_who_has_just_asked_makes_steps_short_again() -> None:
    asked = WaitingSequence(2, 40, arrived=8.9)
    later = replace(state([prefilling(1, 500)], [asked]), now=9.0)
    assert reading(0.08).inform(later).max_rows == pytest.approx(20, abs=2)


def test_steps_with_answers_and_those_nobody_waits_for_stay_short() -> None:
    slow, queued = reading(0.08), WaitingSequence(3, 500)
    beside_an_answer = replace(state([prefilling(1, 500), decoding(2)]), now=9.0)
    in_the_background = replace(state(background=[queued]), now=9.0)
    for each in (beside_an_answer, in_the_background):
        assert slow.inform(each).max_rows == pytest.approx(20, abs=2)


def test_the_context_of_the_prompt_that_runs_next_counts() -> None:
    slow = limit(0.0007)
    later = prefilling(1, 8000, computed=4000)
    queued = WaitingSequence(2, 4100)
    cached = CacheFacts({2: CachedPrefix(4000, 0)})
    assert slow.inform(PROMPT).max_rows is None
    assert slow.inform(state([later])).max_rows == pytest.approx(71, abs=4)
    assert slow.inform(state(waiting=[queued], cache=cached)).max_rows == pytest.approx(71, abs=4)
    assert slow.inform(state(background=[queued], cache=cached)).max_rows == pytest.approx(
        71, abs=4
    )
    assert slow.inform(state(waiting=[queued])).max_rows is None


def test_the_first_steps_are_not_judged() -> None:
    made = StepTimeLimit(0.1, StepCost(), 128)
    for _ in range(MIN_STEPS - 1):
        made.record_step(128, 10, 3.0)
        assert made.inform(PROMPT).max_rows is None
    made.record_step(128, 10, 3.0)
    assert made.inform(PROMPT).max_rows == MIN_ROWS


def test_policies_are_told_what_steps_cost_once_it_is_known() -> None:
    assert StepTimeLimit(0.1, StepCost(), 128).inform(PROMPT).step_seconds is None
    told = limit(0.0005).inform(PROMPT)
    assert told.step_seconds is not None
    assert told.step_seconds(64, 10) == pytest.approx(0.032, rel=0.05)


class TestEstimates:
    def made(self, decodes: int, decode_keys: int, prompt_keys: int) -> StepEstimate:
        """Rows cost 1 ms each, and each key that one attends to 1 microsecond."""
        return StepEstimate(
            lambda rows, keys: rows * (1e-3 + 1e-6 * keys), decodes, decode_keys, prompt_keys
        )

    def test_a_step_has_all_decodes_and_the_rest_is_a_prompt(self) -> None:
        made = self.made(4, 4000, 500)
        assert made.seconds(0) == made.seconds(4) == pytest.approx(0.004 + 0.004)
        assert made.seconds(104) == pytest.approx(0.104 + 0.004 + 0.05)

    def test_what_runs_next_is_estimated(self) -> None:
        known = replace(
            state([decoding(1, 70), decoding(2, 50), prefilling(3, 90, 40)]),
            step_seconds=lambda rows, keys: 0.0,
        )
        found = estimate_steps(known)
        assert found is not None
        assert (found.decodes, found.decode_keys, found.prompt_keys) == (2, 120, 40)

    def test_nothing_is_estimated_without_prompts_or_costs(self) -> None:
        assert estimate_steps(PROMPT) is None
        known = replace(state([decoding(1)]), step_seconds=lambda rows, keys: 0.0)
        assert estimate_steps(known) is None

    @given(st.integers(0, 40), st.integers(0, 4000), st.integers(0, 4000), st.floats(0.001, 3.0))
    def test_the_budget_is_the_largest_that_keeps_the_time(
        self, decodes: int, decode_keys: int, prompt_keys: int, seconds: float
    ) -> None:
        made = self.made(decodes, decode_keys, prompt_keys)
        found = max_rows_within(seconds, made, 2048)
        fitting = [rows for rows in range(1, 2049) if made.seconds(rows) <= seconds]
        assert found == max([*fitting[-1:], MIN_ROWS])
