"""Intervals: Student's over contexts, and wide enough for the few there are."""

import math
import random
from statistics import fmean, stdev

import pytest

from midfill_lab.bench.scbench.estimates import Value, estimate, student_quantile


def test_of_one_task_it_is_the_textbooks_interval() -> None:
    means = [0.2, 0.5, 0.9, 0.4]
    values = [Value(mean + shift, "kv", f"{mean}") for mean in means for shift in (-0.1, 0.1)]
    found = estimate(values)
    assert found is not None
    assert found.mean == pytest.approx(fmean(means))
    assert found.reach == pytest.approx(3.182 * stdev(means) / math.sqrt(4))
    assert found.contexts == 4
    assert (found.low, found.high) == (found.mean - found.reach, found.mean + found.reach)


def test_tasks_weigh_alike_and_their_difference_widens_nothing() -> None:
    tasks = {"a": (0.0, 1.0), "b": (10.0, 10.5, 11.0)}
    values = [Value(one, task, f"{one}") for task, each in tasks.items() for one in each]
    found = estimate(values)
    assert found is not None
    assert found.mean == pytest.approx((0.5 + 10.5) / 2)
    assert found.reach == pytest.approx(3.182 * math.sqrt(0.5 / 2 + 0.25 / 3) / 2)


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        found = estimate([Value(rng.gauss(3.0, 2.0), "kv", f"{i}") for i in range(4)])
        assert found is not None
        held += found.low <= 3.0 <= found.high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_contexts_that_agree_are_no_certainty() -> None:
    found = estimate([Value(0.0, "kv", f"{i}") for i in range(5)], unit=1.0)
    assert found is not None
    assert found.reach is not None
    assert (1 - found.reach) ** 5 == pytest.approx(0.025)


def test_one_context_has_no_interval_and_nothing_no_mean() -> None:
    found = estimate([Value(1.0, "kv", "a")])
    assert found is not None
    assert found.reach is None
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert estimate([]) is None


def test_quantiles_go_on_smoothly_to_the_normal_one() -> None:
    assert student_quantile(1) == 12.706
    assert student_quantile(30) == pytest.approx(student_quantile(31), abs=0.01)
    assert student_quantile(10**6) == pytest.approx(1.96, abs=1e-4)
