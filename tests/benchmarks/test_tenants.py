"""bench tenants: a difference is seen where there is one, and none where there is none."""

import numpy as np
import pytest

from benchmarks.tenants import compare

RNG = np.random.default_rng(7)


def naive_distance(first: np.ndarray, second: np.ndarray) -> float:
    """The largest distance of two distribution functions, at every value."""
    return max(
        abs(np.mean(first <= value) - np.mean(second <= value)) for value in (*first, *second)
    )


def drifting(count: int) -> np.ndarray:
    """What a machine makes of equal requests: noise, and a drift larger than the noise."""
    return np.linspace(1, 3, count) + RNG.gamma(2, 0.05, count)


def test_times_that_differ_by_chance_alone_are_not_told_apart() -> None:
    likely = [compare(drifting(80), drifting(80), seed) for seed in range(5)]
    assert sum(each.p > 0.05 for each in likely) >= 4
    assert all(0.35 < each.told_apart < 0.65 for each in likely)


def test_a_small_difference_in_every_pair_is_seen() -> None:
    times = drifting(200)
    found = compare(times * 0.9, times + RNG.normal(0, 0.01, 200))
    assert found.p < 0.01
    assert found.told_apart > 0.5


@pytest.mark.parametrize("ties", [False, True])
def test_the_distance_is_kolmogorovs(ties: bool) -> None:
    first, second = RNG.random(31), RNG.random(31) + 0.2
    if ties:
        first, second = first.round(1), second.round(1)
    assert compare(first, second).distance == pytest.approx(naive_distance(first, second))


def test_equal_times_have_no_distance() -> None:
    found = compare([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (found.distance, found.p, found.told_apart) == (0.0, 1.0, 0.5)
