"""Bootstrap: intervals cover the truth as often as they say, also where values come in groups."""

import numpy as np
import pytest

from midfill.evaluation.bootstrap import estimate_difference, estimate_mean


def names(count: int, size: int = 1) -> list[str]:
    return [f"g{i // size}" for i in range(count)]


def test_the_mean_is_in_its_interval_and_the_seed_decides() -> None:
    values = [0.0, 1.0] * 50
    estimate = estimate_mean(values, names(100))
    assert estimate.value == 0.5
    assert estimate.count == 100
    assert 0.35 < estimate.low < 0.44 < 0.56 < estimate.high < 0.65  # 0.5 -+ 1.96 * 0.05
    assert estimate == estimate_mean(values, names(100))


def test_equal_values_leave_no_doubt() -> None:
    estimate = estimate_mean([1.0] * 10, names(10))
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)


def test_a_paired_difference_is_surer_than_two_means() -> None:
    generator = np.random.default_rng(0)
    first = generator.random(200)
    second = first + 0.05 + generator.normal(0, 0.01, 200)
    difference = estimate_difference(first.tolist(), second.tolist(), names(200))
    assert 0.04 < difference.low < difference.value < difference.high < 0.06
    mean = estimate_mean(first.tolist(), names(200))
    assert difference.high - difference.low < 0.1 * (mean.high - mean.low)
    with pytest.raises(ValueError, match="paired"):
        estimate_difference([0.0], [0.0, 1.0], names(1))


def test_intervals_cover_the_truth_when_holes_of_a_function_are_alike() -> None:
    generator = np.random.default_rng(1)
    covered = {"groups": 0, "alone": 0}
    for _ in range(100):
        values = np.repeat(generator.random(40) < 0.5, 10).astype(float).tolist()
        for how, groups in (("groups", names(400, 10)), ("alone", names(400))):
            estimate = estimate_mean(values, groups)
            covered[how] += estimate.low <= 0.5 <= estimate.high
    assert covered["groups"] >= 88  # 95 on average
    assert covered["alone"] <= 70  # what resampling single holes would claim
