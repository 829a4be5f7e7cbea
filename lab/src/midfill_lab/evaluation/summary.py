"""Summaries: mean scores of a report, and differences between conditions and between reports.

Holes in the same function or file are not independent: a model that fills one of them is likely to
fill the next. Whole groups are therefore resampled (the cluster bootstrap: Efron and Tibshirani,
"An Introduction to the Bootstrap", 1993; Cameron, Gelbach and Miller, 2008). This gives honest
intervals, usually wider than those from resampling single holes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from midfill.errors import MidfillError
from midfill_lab.evaluation.evaluate import InfillingReport, Outcome, ProblemRecord
from midfill_lab.evaluation.problems import Task

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


def estimate_share(values: Sequence[bool], groups: Sequence[str], seed: int = 0) -> Estimate:
    """Estimate a share, resampling by group.

    Resamples of values that are all equal are all equal, too, and show nothing of what might have
    been. The interval then ends where that many independent groups would all agree in one of 40
    cases (Clopper and Pearson, 1934): 40 of 40 is [91%, 100%].

    Args:
        values: at least one.
        groups: the group of each value.
        seed: seed of the resampling.
    """
    found = estimate_mean([float(value) for value in values], groups, seed)
    bound = float((_TAIL / 100) ** (1 / len(set(groups))))
    if all(values):
        return msgspec.structs.replace(found, low=bound)
    if not any(values):
        return msgspec.structs.replace(found, high=1 - bound)
    return found


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


SCORES: Mapping[str, str] = {
    "pass": "pass@1",
    "pass_first_line": "pass@1, 1st line",
    "exact": "exact",
    "exact_first_line": "exact, 1st line",
    "similarity": "similarity",
    "subtoken": "subtoken",
    "empty": "empty",
    "stops": "stops",
}
"""Names of scores and their titles, in the order of tables."""

BASELINE = "psm"
"""The condition that the others are compared with, if it was measured."""

Summary = dict[str, dict[str, Estimate]]
"""Condition -> score -> estimate."""


class Comparison(msgspec.Struct, frozen=True):
    """One score of two reports in one condition.

    Attributes:
        first, second: the means over the problems they share.
        difference: second minus first, paired by problem.
    """

    first: Estimate
    second: Estimate
    difference: Estimate


def tasks_of(report: InfillingReport) -> list[Task]:
    """Return the tasks of a report's problems, in order."""
    return list(dict.fromkeys(problem.task for problem in report.problems))


def baseline_of(report: InfillingReport) -> str:
    """Return the condition that a report's others are compared with."""
    return BASELINE if BASELINE in report.outcomes else next(iter(report.outcomes))


def summarise(report: InfillingReport, task: Task) -> Summary:
    """Return the mean scores of every condition."""
    indices = _indices(report.problems, task)
    groups = [report.problems[index].group for index in indices]
    return {
        condition: {
            name: estimate_mean(values, groups)
            for name, values in _values([outcomes[index] for index in indices]).items()
        }
        for condition, outcomes in report.outcomes.items()
    }


def differences(report: InfillingReport, task: Task) -> Summary:
    """Return the mean scores of every other condition minus the baseline's, paired by problem."""
    indices = _indices(report.problems, task)
    groups = [report.problems[index].group for index in indices]
    values = {
        condition: _values([outcomes[index] for index in indices])
        for condition, outcomes in report.outcomes.items()
    }
    baseline = baseline_of(report)
    return {
        condition: {
            name: estimate_difference(values[baseline][name], scores[name], groups)
            for name in scores
        }
        for condition, scores in values.items()
        if condition != baseline
    }


def compare_reports(
    first: InfillingReport, second: InfillingReport, pairs: Sequence[tuple[str, str]] = ()
) -> dict[Task, dict[str, dict[str, Comparison]]]:
    """Compare two reports over the problems they share.

    Args:
        first, second: the reports.
        pairs: (condition of the first, condition of the second). By default, every condition
            that both have is compared with itself.

    Returns:
        Task -> condition -> score -> comparison.

    Raises:
        MidfillError: a condition is missing, the reports share no condition or no problem, or one
            id names different problems.
    """
    pairs = pairs or [(name, name) for name in first.outcomes if name in second.outcomes]
    if not pairs:
        raise MidfillError("the two files share no condition; there is nothing to compare")
    for first_name, second_name in pairs:
        for which, name, report in (
            ("first", first_name, first),
            ("second", second_name, second),
        ):
            if name not in report.outcomes:
                raise MidfillError(
                    f"the {which} file has no condition {name!r}, only {', '.join(report.outcomes)}"
                )
    shared = _shared_indices(first.problems, second.problems)
    tasks = [task for task in tasks_of(first) if task in tasks_of(second)]
    return {
        task: {
            a if a == b else f"{a} / {b}": _compare(
                [first.outcomes[a][index] for index, _ in chosen],
                [second.outcomes[b][index] for _, index in chosen],
                [first.problems[index].group for index, _ in chosen],
            )
            for a, b in pairs
        }
        for task in tasks
        if (chosen := [pair for pair in shared if first.problems[pair[0]].task == task])
    }


def _shared_indices(
    first: Sequence[ProblemRecord], second: Sequence[ProblemRecord]
) -> list[tuple[int, int]]:
    """Return the indices of each shared problem in both reports."""
    indices = {problem.id: index for index, problem in enumerate(second)}
    shared = [
        (index, indices[problem.id]) for index, problem in enumerate(first) if problem.id in indices
    ]
    if not shared:
        raise MidfillError("the two files share no problem: the same data and seed are needed")
    for at, other in shared:
        if first[at].digest != second[other].digest:
            raise MidfillError(
                f"problem {first[at].id} is another text in the second file;"
                " both runs need the same files"
            )
    return shared


def _compare(
    first: Sequence[Outcome], second: Sequence[Outcome], groups: Sequence[str]
) -> dict[str, Comparison]:
    ours, theirs = _values(first), _values(second)
    return {
        name: Comparison(
            estimate_mean(ours[name], groups),
            estimate_mean(theirs[name], groups),
            estimate_difference(ours[name], theirs[name], groups),
        )
        for name in ours
        if name in theirs  # a report of an earlier version may lack some
    }


def _indices(problems: Sequence[ProblemRecord], task: Task) -> list[int]:
    return [index for index, problem in enumerate(problems) if problem.task == task]


def _values(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return score -> one value per outcome; all outcomes of a task have the same scores."""
    return {
        name: [outcome.scores[name] for outcome in outcomes]
        for name in SCORES
        if name in outcomes[0].scores
    }
