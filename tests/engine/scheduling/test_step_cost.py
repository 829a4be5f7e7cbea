"""MeasuredStepCost: the time of a step by its rows and context, learned from steps that ran."""

import pytest

from midfill.engine.scheduling.step_cost import MeasuredStepCost


def learned(
    times: dict[int, float],
    rounds: int = 60,
    *,
    context: float = 10,
    cost: MeasuredStepCost | None = None,
) -> MeasuredStepCost:
    cost = cost or MeasuredStepCost()
    for _ in range(rounds):
        for rows, seconds in times.items():
            cost.observe(rows, context, seconds)
    return cost


def test_it_starts_from_a_guess_and_one_step_sets_the_scale() -> None:
    cost = MeasuredStepCost()
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
    guess = MeasuredStepCost()
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
