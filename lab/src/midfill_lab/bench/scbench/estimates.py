"""Estimates: means over contexts with their 95% intervals.

Questions about one context are not independent, and there are few contexts per task: intervals are
Student's, over the means of contexts. A bootstrap over a handful of contexts would be too narrow.
A mean over several tasks weighs them alike, and only the contexts of each are drawn (stratified).
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042)  # fmt: skip
"""Student's 97.5% quantiles with 1 to 30 degrees of freedom."""


class Estimate(NamedTuple):
    """A mean.

    Attributes:
        mean: over tasks, and over the contexts of each.
        reach: half of its 95% interval; None where a task has one context only.
        contexts: how many there are.
    """

    mean: float
    reach: float | None
    contexts: int

    @property
    def low(self) -> float:
        """The interval's lower end; minus infinity where there is none."""
        return -math.inf if self.reach is None else self.mean - self.reach

    @property
    def high(self) -> float:
        """The interval's upper end; infinity where there is none."""
        return math.inf if self.reach is None else self.mean + self.reach


class Value(NamedTuple):
    """One question's value, with its task and its context."""

    value: float
    task: str
    context: str


def student_quantile(degrees: int) -> float:
    """Return Student's 97.5% quantile."""
    return _T975[degrees - 1] if degrees <= len(_T975) else 1.96 + 2.4 / degrees


def estimate(values: Sequence[Value], *, unit: float | None = None) -> Estimate | None:
    """Estimate a mean; None of no values.

    Args:
        values: of all questions.
        unit: the most that one value can be off, for shares and their differences 1. Where no
            context differs from another, their spread says nothing: with n of them, at most 1 in
            20 means that are off by ``unit * (1 - 0.025 ** (1 / n))`` or more would show none.
    """
    contexts: dict[str, dict[str, list[float]]] = {}
    for one in values:
        contexts.setdefault(one.task, {}).setdefault(one.context, []).append(one.value)
    if not contexts:
        return None
    tasks = [[fmean(found) for found in each.values()] for each in contexts.values()]
    mean, count = fmean(fmean(each) for each in tasks), sum(map(len, tasks))
    if min(map(len, tasks)) < 2:
        return Estimate(mean, None, count)
    squared = sum(variance(each) / len(each) for each in tasks) / len(tasks) ** 2
    if squared == 0.0 and unit is not None:
        return Estimate(mean, unit * (1 - 0.025 ** (1 / count)), count)
    reach = student_quantile(count - len(tasks)) * math.sqrt(squared)
    return Estimate(mean, reach, count)
