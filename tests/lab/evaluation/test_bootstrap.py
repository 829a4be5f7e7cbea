"""Bootstrap intervals cover the true mean as often as they should, also for grouped values."""

import numpy as np
import pytest

from midfill.lab.evaluation.bootstrap import estimate_difference, estimate_mean


def names(count: int, size: int = 1) -> list[str]:
    return [f"g{i // size}" for i in range(count)]


def test_the_mean_is_in_its_interval_and_the_seed_decides() -> None:
    values = [0.0, 1.0] * 50
    estimate = estimate_mean(values, names(100))
    assert estimate.value == 0.5
    assert estimate.count == 100
    assert 0.35 < estimate.low < 0.44 < 0.56 < estimate.high < 0.65  # 0.5 -+ 1.96 * 0.05
    assert estimate == estimate_mean(values, names(100))


def test_the_interval_of_equal_values_has_width_0() -> None:
    estimate = estimate_mean([1.0] * 10, names(10))
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)


def test_a_paired_difference_has_a_narrower_interval_than_a_mean() -> None:
    generator = np.random.default_rng(0)
    first = generator.random(200)
    second = first + 0.05 + generator.normal(0, 0.01, 200)
    difference = estimate_difference(first.tolist(), second.tolist(), names(200))
    assert 0.04 < difference.low < difference.value < difference.high < 0.06
    mean = estimate_mean(first.tolist(), names(200))
    assert difference.high - difference.low < 0.1 * (mean.high - mean.low)
    with pytest.raises(ValueError, match="paired"):
        estimate_difference([0.0], [0.0, 1.0], names(1))


def test_intervals_cover_the_true_mean_when_values_of_a_group_are_equal() -> None:
    generator = np.random.default_rng(1)
    covered = {"groups": 0, "alone": 0}
    for _ in range(100):
        values = np.repeat(generator.random(40) < 0.5, 10).astype(float).tolist()
        for how, groups in (("groups", names(400, 10)), ("alone", names(400))):
            estimate = estimate_mean(values, groups)
            covered[how] += estimate.low <= 0.5 <= estimate.high
    assert covered["groups"] >= 88  # 95 on average
    assert covered["alone"] <= 70  # what resampling single holes would claim
