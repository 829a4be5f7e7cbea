"""MeasuredStepCost: the time of a step by its rows, from the steps that ran."""

import pytest

from midfill.engine.step_cost import MeasuredStepCost


def learnt(times: dict[int, float], rounds: int = 60) -> MeasuredStepCost:
    cost = MeasuredStepCost()
    for _ in range(rounds):
        for rows, seconds in times.items():
            cost.observe(rows, seconds)
    return cost


def test_it_starts_from_a_guess_and_one_step_sets_the_scale() -> None:
    cost = MeasuredStepCost()
    shape = [cost.seconds(rows) / cost.seconds(1) for rows in range(1, 200)]
    assert shape == sorted(shape)
    cost.observe(1, 0.012)
    assert cost.seconds(1) == pytest.approx(0.012)
    assert [cost.seconds(rows) / 0.012 for rows in range(1, 200)] == pytest.approx(shape)


def test_times_that_were_seen_are_known() -> None:
    times = {1: 0.012, 2: 0.013, 4: 0.019, 8: 0.029, 16: 0.05, 128: 0.3}
    cost = learnt(times)
    for rows, seconds in times.items():
        assert cost.seconds(rows) == pytest.approx(seconds, rel=0.01)


def test_between_and_beyond_them_it_is_a_line() -> None:
    cost = learnt({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5, 32: 4.1, 64: 7.3, 128: 13.7})
    for rows in (3, 6, 7, 11, 25, 100, 200, 500):
        assert cost.seconds(rows) == pytest.approx(0.9 + 0.1 * rows, rel=0.02)


def test_numbers_of_rows_never_seen_follow_in_proportion() -> None:
    cost = learnt({1: 0.5})
    guess = MeasuredStepCost()
    for rows in (2, 5, 8, 128):
        ratio = guess.seconds(rows) / guess.seconds(1)
        assert cost.seconds(rows) == pytest.approx(0.5 * ratio)


def test_an_interrupted_step_does_little() -> None:
    cost = learnt({1: 0.01, 4: 0.02})
    cost.observe(1, 5.0)
    assert cost.seconds(1) < 0.0125


def test_a_machine_that_became_slower_is_noticed() -> None:
    cost = learnt({1: 0.01, 4: 0.02})
    for _ in range(60):
        cost.observe(1, 0.03)
        cost.observe(4, 0.06)
    assert cost.seconds(1) == pytest.approx(0.03, rel=0.02)
    assert cost.seconds(4) == pytest.approx(0.06, rel=0.02)
