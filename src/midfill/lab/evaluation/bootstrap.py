"""Means with bootstrap intervals, and paired differences of means.

Holes in the same function or file are not independent: a model that fills one of them is likely to
fill the next. Whole groups are therefore resampled (the cluster bootstrap: Efron and Tibshirani,
"An Introduction to the Bootstrap", 1993; Cameron, Gelbach and Miller, 2008). This gives honest
intervals, usually wider than those from resampling single holes.
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

RESAMPLES = 4000
_TAIL = 2.5  # percent beyond each end of the interval


class Estimate(msgspec.Struct, frozen=True):
    """A mean with its 95% interval.

    Attributes:
        value: the mean over all values.
        low, high: 2.5th and 97.5th percentile of the resampled means.
        count: number of values.
    """

    value: float
    low: float
    high: float
    count: int


def estimate_mean(values: Sequence[float], groups: Sequence[str], seed: int = 0) -> Estimate:
    """Estimate a mean, resampling by group.

    Args:
        values: at least one.
        groups: the group of each value.
        seed: seed of the resampling.
    """
    array = np.asarray(values, np.float64)
    membership, weights = _resamples(tuple(groups), seed)
    sums, sizes = np.bincount(membership, array), np.bincount(membership)
    means = (weights @ sums) / (weights @ sizes)
    low, high = np.percentile(means, [_TAIL, 100 - _TAIL])
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def estimate_difference(
    first: Sequence[float], second: Sequence[float], groups: Sequence[str], seed: int = 0
) -> Estimate:
    """Estimate the mean of ``second`` minus ``first``; values at one index are of the same hole.

    Raises:
        ValueError: they have different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values can't be paired with {len(second)}")
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    return estimate_mean(differences.tolist(), groups, seed)


@lru_cache(maxsize=2)  # all scores of a table have the same groups
def _resamples(
    groups: tuple[str, ...], seed: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Return the group index of each value, and how often each resample draws each group.

    Shapes: [values] and [resamples, groups].
    """
    names, membership = np.unique(np.asarray(groups), return_inverse=True)
    count = len(names)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return membership, weights.astype(np.float32)
