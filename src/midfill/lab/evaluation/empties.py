"""Empty answers: how often a threshold gives them where something is missing, and where not.

Every caret is asked three times (``engine.sampling.empty_answer`` explains the threshold):

* ``off``: without a threshold;
* ``never``: with 1, so that no answer is empty by rule;
* ``always``: with one next to 0, so that nearly all are, and the probability is measured.

So it is known what any threshold would give: nothing where the probability is above it, and the
second answer elsewhere. One half of the files and functions chooses the threshold: the smallest
that loses at most a given share of the answers where something is missing, that is, makes them
empty though they would have text. The other half shows what it is worth.

Where the right answer is unclear, a caret says nothing about thresholds. Therefore carets where
something is missing are those whose files show it (``gaps``), and HumanEval's lines, which are
missing from whole functions with a description.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill.lab.evaluation.bootstrap import Estimate, estimate_mean
from midfill.lab.evaluation.choice import Half, split_in_halves
from midfill.lab.evaluation.conditions import Condition
from midfill.lab.evaluation.problems import CARET_TASKS, EMPTY_TASKS, Task
from midfill.lab.evaluation.run import InfillingReport, Outcome

_OFF, _NEVER, _ALWAYS = "off", "never", "always"
_NEXT_TO_0 = 1e-30
EMPTY_CONDITIONS: tuple[Condition, ...] = (
    Condition(_OFF, "planner", healing=True, empty_threshold=0.0),
    Condition(_NEVER, "planner", healing=True, empty_threshold=1.0),
    Condition(_ALWAYS, "planner", healing=True, empty_threshold=_NEXT_TO_0),
)
LEAST_THRESHOLD = 0.01
"""No smaller threshold is chosen: there the rule would overrule a model that is sure."""


@dataclass(frozen=True)
class CaretResult:
    """What a model did at one caret.

    Attributes:
        task: the kind of the caret.
        group: the function or file.
        missing: whether something is missing.
        probability: of the empty answer.
        off, never: the answers in these conditions.
    """

    task: Task
    group: str
    missing: bool
    probability: float
    off: Outcome
    never: Outcome

    @property
    def lost_below(self) -> float:
        """The thresholds below it lose the answer; an answer without text can't be lost."""
        return 0.0 if self.never.scores["empty"] else self.probability

    def score(self, name: str, threshold: float) -> float:
        """Return a score with a threshold; 0 is without."""
        if threshold == 0.0:
            return self.off.scores[name]
        if self.probability > threshold:
            return float(name == "empty")  # nothing is ever exact where something is missing
        return self.never.scores[name]


class EmptyRates(msgspec.Struct, frozen=True):
    """The shares of empty answers with one threshold.

    Attributes:
        threshold: the threshold; 0 is none.
        missing, nothing: shares where something, and where nothing is missing.
    """

    threshold: float
    missing: Estimate
    nothing: Estimate


@dataclass(frozen=True)
class EmptyChoice:
    """A threshold, and the carets it is reported on.

    Attributes:
        threshold: the threshold.
        limit: the greatest share of answers where something is missing that it may lose; None if
            it was given and not chosen.
        chosen_on: the carets it was chosen on; none if it was given.
        reported_on: the others.
    """

    threshold: float
    limit: float | None
    chosen_on: list[CaretResult]
    reported_on: list[CaretResult]


def empty_conditions(format: FimFormat | None) -> tuple[Condition, ...]:
    """Return the conditions to ask in.

    Raises:
        MidfillError: the model doesn't see what follows the caret.
    """
    if format is None:
        raise MidfillError(
            "the model has no FIM tokens that midfill knows: name them with --fim-tokens"
        )
    return EMPTY_CONDITIONS


def caret_tasks(humaneval: bool) -> tuple[Task, ...]:
    """Return the kinds of carets to ask."""
    return (*(("single-line",) if humaneval else ()), *CARET_TASKS)


def choose_empty(report: InfillingReport, *, limit: float = 0.04) -> EmptyChoice:
    """Choose the threshold on one half of a report's holes.

    Args:
        report: its conditions are ``EMPTY_CONDITIONS``.
        limit: the greatest share of answers where something is missing that it may lose.

    Raises:
        MidfillError: the report has other conditions, or one half lacks a kind of carets.
    """
    results = caret_results(report)
    halves = split_in_halves([one.group for one in results], report.options.seed)

    def half(name: Half) -> list[CaretResult]:
        return [one for one, own in zip(results, halves, strict=True) if own == name]

    chosen_on, reported_on = half("choice"), half("report")
    for part in (chosen_on, reported_on):
        _check_both(part)
    threshold = smallest_threshold([one.lost_below for one in chosen_on if one.missing], limit)
    return EmptyChoice(threshold, limit, chosen_on, reported_on)


def given_empty(report: InfillingReport, threshold: float) -> EmptyChoice:
    """Return a given threshold, to be reported on all holes.

    Raises:
        MidfillError: as for ``choose_empty``.
    """
    results = caret_results(report)
    _check_both(results)
    return EmptyChoice(threshold, None, [], results)


def smallest_threshold(probabilities: Sequence[float], limit: float) -> float:
    """Return the smallest threshold that at most a share of the probabilities is above.

    It is rounded up to two digits, and at least ``LEAST_THRESHOLD``.
    """
    above = math.floor(limit * len(probabilities) + 1e-9)
    if above >= len(probabilities):
        return LEAST_THRESHOLD
    found = max(LEAST_THRESHOLD, sorted(probabilities, reverse=True)[above])
    unit = 10.0 ** (math.floor(math.log10(found)) - 1)
    return min(1.0, round(math.ceil(found / unit - 1e-9) * unit, 12))


def caret_results(report: InfillingReport) -> list[CaretResult]:
    """Return a report's results by caret.

    Raises:
        MidfillError: the report has other conditions.
    """
    if set(report.outcomes) != {condition.name for condition in EMPTY_CONDITIONS}:
        raise MidfillError("these are not results of 'midfill eval empty'")
    rows = zip(
        report.problems, *(report.outcomes[name] for name in (_OFF, _NEVER, _ALWAYS)), strict=True
    )
    return [
        CaretResult(
            problem.task,
            problem.group,
            problem.task not in EMPTY_TASKS,
            always.empty_probability or 0.0,
            off,
            never,
        )
        for problem, off, never, always in rows
    ]


def rates(results: Sequence[CaretResult], threshold: float) -> EmptyRates:
    """Return the shares of empty answers with a threshold; there are carets of either kind."""
    missing = [one for one in results if one.missing]
    nothing = [one for one in results if not one.missing]
    return EmptyRates(
        threshold, estimate(missing, "empty", threshold), estimate(nothing, "empty", threshold)
    )


def estimate(results: Sequence[CaretResult], score: str, threshold: float) -> Estimate:
    """Return the mean of a score with a threshold."""
    values = [one.score(score, threshold) for one in results]
    return estimate_mean(values, [one.group for one in results])


def separation(results: Sequence[CaretResult]) -> float:
    """Return how often an empty answer is more probable where nothing is missing: AUC, 0 to 1."""
    missing = np.array([one.probability for one in results if one.missing])
    nothing = np.array([[one.probability] for one in results if not one.missing])
    return float(np.mean((nothing > missing) + 0.5 * (nothing == missing)))


def _check_both(results: Sequence[CaretResult]) -> None:
    if len({one.missing for one in results}) < 2:
        raise MidfillError(
            "there are too few carets to choose from: half of the files must have carets where"
            " something is missing and carets where nothing is"
        )
