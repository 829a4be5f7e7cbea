"""Summaries: what a report's outcomes amount to, and how two of them differ."""

from collections.abc import Mapping, Sequence

import msgspec

from midfill.errors import MidfillError
from midfill.evaluation.problems import Task
from midfill.evaluation.run import InfillingReport, Outcome, ProblemRecord
from midfill.evaluation.statistics import Estimate, estimate_difference, estimate_mean

SCORES: Mapping[str, str] = {
    "pass": "pass@1",
    "pass_first_line": "pass@1, 1st line",
    "exact": "exact",
    "exact_first_line": "exact, 1st line",
    "similarity": "similarity",
    "subtoken": "subtoken",
    "stops": "stops",
}
"""Scores in the order of tables, with what tables call them."""

BASELINE = "psm"
"""The condition that the others are compared with, where it was measured."""

Summary = dict[str, dict[str, Estimate]]
"""Condition -> score -> estimate."""


class Comparison(msgspec.Struct, frozen=True):
    """One score of two reports in one condition.

    Attributes:
        first, second: the means over the problems they share.
        difference: second less first, paired.
    """

    first: Estimate
    second: Estimate
    difference: Estimate


def tasks_of(report: InfillingReport) -> list[Task]:
    """The tasks of a report's problems, in order."""
    return list(dict.fromkeys(problem.task for problem in report.problems))


def summarise(report: InfillingReport, task: Task) -> Summary:
    """Mean scores of every condition."""
    places = _places(report.problems, task)
    groups = [report.problems[place].group for place in places]
    return {
        condition: {
            name: estimate_mean(values, groups)
            for name, values in _values([outcomes[place] for place in places]).items()
        }
        for condition, outcomes in report.outcomes.items()
    }


def baseline_of(report: InfillingReport) -> str:
    """The condition that a report's others are compared with."""
    return BASELINE if BASELINE in report.outcomes else next(iter(report.outcomes))


def differences(report: InfillingReport, task: Task) -> Summary:
    """Each other condition's mean scores less the baseline's, paired by problem."""
    places = _places(report.problems, task)
    groups = [report.problems[place].group for place in places]
    values = {
        condition: _values([outcomes[place] for place in places])
        for condition, outcomes in report.outcomes.items()
    }
    base = baseline_of(report)
    return {
        condition: {
            name: estimate_difference(values[base][name], scores[name], groups) for name in scores
        }
        for condition, scores in values.items()
        if condition != base
    }


def compare(
    first: InfillingReport, second: InfillingReport, pairs: Sequence[tuple[str, str]] = ()
) -> dict[Task, dict[str, dict[str, Comparison]]]:
    """Task -> condition -> score -> comparison, over the problems that both reports hold.

    Args:
        first, second: reports.
        pairs: (condition of the first, condition of the second); every condition that is in both
            is compared with itself if there are none.

    Raises:
        MidfillError: they lack a condition, share no condition or no problem, or mean different
            texts by one id.
    """
    pairs = pairs or [(name, name) for name in first.outcomes if name in second.outcomes]
    if not pairs:
        raise MidfillError("the two files share no condition; there is nothing to compare")
    for mine, other in pairs:
        for which, name, report in (("first", mine, first), ("second", other, second)):
            if name not in report.outcomes:
                raise MidfillError(
                    f"the {which} file has no condition {name!r}, only {', '.join(report.outcomes)}"
                )
    shared = _shared(first.problems, second.problems)
    tasks = [task for task in tasks_of(first) if task in tasks_of(second)]
    return {
        task: {
            mine if mine == other else f"{mine} | {other}": _compare(
                [first.outcomes[mine][place] for place, _ in chosen],
                [second.outcomes[other][place] for _, place in chosen],
                [first.problems[place].group for place, _ in chosen],
            )
            for mine, other in pairs
        }
        for task in tasks
        if (chosen := [place for place in shared if first.problems[place[0]].task == task])
    }


def _shared(
    first: Sequence[ProblemRecord], second: Sequence[ProblemRecord]
) -> list[tuple[int, int]]:
    """Where the problems that are in both stand in each."""
    places = {problem.id: place for place, problem in enumerate(second)}
    shared = [
        (place, places[problem.id]) for place, problem in enumerate(first) if problem.id in places
    ]
    if not shared:
        raise MidfillError("the two files share no problem: the same data and seed are needed")
    for mine, other in shared:
        if first[mine].digest != second[other].digest:
            raise MidfillError(
                f"problem {first[mine].id} is another text in the second file;"
                " both runs need the same files"
            )
    return shared


def _compare(
    first: Sequence[Outcome], second: Sequence[Outcome], groups: Sequence[str]
) -> dict[str, Comparison]:
    mine, others = _values(first), _values(second)
    return {
        name: Comparison(
            estimate_mean(mine[name], groups),
            estimate_mean(others[name], groups),
            estimate_difference(mine[name], others[name], groups),
        )
        for name in mine
    }


def _places(problems: Sequence[ProblemRecord], task: Task) -> list[int]:
    return [place for place, problem in enumerate(problems) if problem.task == task]


def _values(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Score -> one value an outcome; all of a task have the same scores."""
    return {
        name: [outcome.scores[name] for outcome in outcomes]
        for name in SCORES
        if name in outcomes[0].scores
    }
