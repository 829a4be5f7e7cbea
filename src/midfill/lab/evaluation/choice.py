"""Choosing one of several conditions that cost more and more.

The holes are split in two, by function or file. On one half a condition is chosen, in one of two
ways. Where less is a risk, it is the cheapest one that is as good as the best: its paired
difference from the best has a 95% interval that does not go below a margin. Where more has to
prove its worth, it is the cheapest one than which no dearer one is better beyond doubt. The other
half shows what that choice is worth on holes it was not made on.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from midfill.errors import MidfillError, OptionError
from midfill.lab.evaluation.bootstrap import Estimate, estimate_difference, estimate_mean
from midfill.lab.evaluation.run import InfillingReport
from midfill.lab.evaluation.summary import SCORES

Half = Literal["choice", "report"]


class ChoiceResult(msgspec.Struct, frozen=True):
    """One condition, over half of the holes of all tasks.

    Attributes:
        condition: its name.
        score: its mean score.
        difference: from the condition that is best in the first half, paired by hole.
    """

    condition: str
    score: Estimate
    difference: Estimate


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A condition chosen from several.

    Attributes:
        score: name of the score it was chosen by.
        margin: how much worse than the best it may be, 0 to 1; 0 where more has to prove its worth.
        best, recommended: names of conditions.
        choice: what they were chosen from, the cheapest first.
        report: the same conditions on the other holes.
    """

    score: str
    margin: float
    best: str
    recommended: str
    choice: list[ChoiceResult]
    report: list[ChoiceResult]

    @property
    def on_other_holes(self) -> Estimate:
        """The recommended condition's difference from the best, where it was not chosen."""
        return next(one.difference for one in self.report if one.condition == self.recommended)


def check_score(name: str) -> None:
    """Check the name of a score before the work.

    Raises:
        MidfillError: there is no such score.
    """
    if name not in SCORES:
        raise OptionError(f"--score {name}: there is no such score, only {', '.join(SCORES)}")


def choose_cheapest(
    report: InfillingReport, conditions: Sequence[str], score: str, margin: float
) -> Choice:
    """Choose the first of a report's conditions that is as good as the best.

    Args:
        report: all holes in all these conditions.
        conditions: their names, the cheapest first.
        score: what to choose by.
        margin: how much worse than the best the choice may be, 0 to 1.

    Raises:
        MidfillError: the report lacks the score, or all its holes are of one function or file.
    """
    choice, other = _halves(report)
    on_choice, on_other = (_scores(half, conditions, score) for half in (choice, other))
    best = max(conditions, key=lambda name: sum(on_choice[name]))  # the cheapest of equals
    results = _results(choice, on_choice, best)
    return Choice(
        score=score,
        margin=margin,
        best=best,
        recommended=next(one.condition for one in results if one.difference.low >= -margin),
        choice=results,
        report=_results(other, on_other, best),
    )


def choose_unless_better(report: InfillingReport, conditions: Sequence[str], score: str) -> Choice:
    """Choose the first of a report's conditions than which no later one is better beyond doubt.

    Args:
        report: all holes in all these conditions.
        conditions: their names, the cheapest first.
        score: what to choose by.

    Raises:
        MidfillError: the report lacks the score, or all its holes are of one function or file.
    """
    choice, other = _halves(report)
    on_choice, on_other = (_scores(half, conditions, score) for half in (choice, other))
    groups = [problem.group for problem in choice.problems]
    chosen = conditions[0]
    for name in conditions[1:]:
        if estimate_difference(on_choice[chosen], on_choice[name], groups).low > 0:
            chosen = name
    best = max(conditions, key=lambda name: sum(on_choice[name]))
    return Choice(
        score=score,
        margin=0.0,
        best=best,
        recommended=chosen,
        choice=_results(choice, on_choice, best),
        report=_results(other, on_other, best),
    )


def _halves(report: InfillingReport) -> tuple[InfillingReport, InfillingReport]:
    choice, other = half_of(report, "choice"), half_of(report, "report")
    if not choice.problems or not other.problems:
        raise MidfillError("all holes are of one function or file: there is nothing to choose from")
    return choice, other


def split_in_halves(groups: Sequence[str], seed: int) -> list[Half]:
    """Return the half that each hole is in; holes of a group are in the same one."""
    names = sorted(set(groups))
    random.Random(f"{seed}/halves").shuffle(names)
    chosen = set(names[: len(names) // 2])
    return ["choice" if group in chosen else "report" for group in groups]


def indices_of_half(report: InfillingReport, half: Half) -> list[int]:
    """Return the indices of the holes in one half of a report."""
    halves = split_in_halves([problem.group for problem in report.problems], report.options.seed)
    return [index for index, own in enumerate(halves) if own == half]


def half_of(report: InfillingReport, half: Half) -> InfillingReport:
    """Return a report with one half of its holes."""
    kept = indices_of_half(report, half)
    return msgspec.structs.replace(
        report,
        problems=[report.problems[index] for index in kept],
        outcomes={
            name: [outcomes[index] for index in kept] for name, outcomes in report.outcomes.items()
        },
    )


def _scores(
    report: InfillingReport, conditions: Sequence[str], score: str
) -> dict[str, list[float]]:
    """Return one value per hole and condition."""
    scores = {}
    for name in conditions:
        outcomes = report.outcomes[name]
        if not all(score in one.scores for one in outcomes):
            known = [each for each in SCORES if all(each in one.scores for one in outcomes)]
            raise OptionError(
                f"--score {score}: not all of these tasks have it; they have {', '.join(known)}"
            )
        scores[name] = [one.scores[score] for one in outcomes]
    return scores


def _results(
    report: InfillingReport, scores: Mapping[str, Sequence[float]], best: str
) -> list[ChoiceResult]:
    groups = [problem.group for problem in report.problems]
    return [
        ChoiceResult(
            name,
            estimate_mean(values, groups),
            estimate_difference(scores[best], values, groups),
        )
        for name, values in scores.items()
    ]
