"""Quality against the cut: how much text before the caret a model needs after the suffix.

Every hole is asked with the suffix at several distances before the caret, each at the place where
the planner would cut there (``infill/cut_places.py``). The holes are then split in two, by function
or file. On one half the best distance is found, and the least one that is as good: its paired
difference from the best has a 95% interval that does not go below a margin. The other half shows
what that choice is worth on holes it was not made on.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from midfill.checkpoints.model_record import MAX_LEAST_INCREMENT
from midfill.errors import MidfillError
from midfill.evaluation.bootstrap import Estimate, estimate_difference, estimate_mean
from midfill.evaluation.conditions import Condition
from midfill.evaluation.run import InfillingReport
from midfill.evaluation.summary import SCORES
from midfill.infill.formats import FimFormat

WHOLE = "whole"
DEFAULT_DISTANCES = "0,32,96,200,400,800,whole"
Half = Literal["choice", "report"]


class CutResult(msgspec.Struct, frozen=True):
    """One distance, over half of the holes of all tasks.

    Attributes:
        least_increment: the distance in characters.
        score: its mean score.
        difference: from the distance that is best in the first half, paired by hole.
    """

    least_increment: int
    score: Estimate
    difference: Estimate


class CutChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The distance that a model's prompts should be cut at.

    Attributes:
        score: name of the score it was chosen by.
        margin: how much worse than the best it may be, 0 to 1.
        best, recommended: least increments in characters.
        choice: what they were chosen from, by distance.
        report: the same distances on the other holes.
    """

    score: str
    margin: float
    best: int
    recommended: int
    choice: list[CutResult]
    report: list[CutResult]

    @property
    def on_other_holes(self) -> Estimate:
        """The recommended distance's difference from the best, where it was not chosen."""
        return next(
            one.difference for one in self.report if one.least_increment == self.recommended
        )


def parse_distances(text: str) -> tuple[int, ...]:
    """Parse distances in characters, separated by commas; "whole" is the whole prefix.

    Raises:
        MidfillError: it is something else, or fewer than two.
    """
    distances = set()
    for part in (each.strip() for each in text.split(",")):
        if part == WHOLE:
            distances.add(MAX_LEAST_INCREMENT)
        elif part.isascii() and part.isdigit() and int(part) < MAX_LEAST_INCREMENT:
            distances.add(int(part))
        else:
            raise MidfillError(
                f"--distances takes characters and 'whole', like {DEFAULT_DISTANCES}, not {part!r}"
            )
    if len(distances) < 2:
        raise MidfillError("--distances names one distance; there is nothing to choose from")
    return tuple(sorted(distances))


def check_score(name: str) -> None:
    """Check the name of a score before the work.

    Raises:
        MidfillError: there is no such score.
    """
    if name not in SCORES:
        raise MidfillError(f"--score {name}: there is no such score, only {', '.join(SCORES)}")


def distance_name(distance: int) -> str:
    """Return a distance's name in tables."""
    return WHOLE if distance >= MAX_LEAST_INCREMENT else str(distance)


def cut_conditions(distances: Sequence[int], format: FimFormat | None) -> tuple[Condition, ...]:
    """Return a condition for each distance.

    Raises:
        MidfillError: the model's prompts are not cut.
    """
    if format is None:
        raise MidfillError(
            "the model has no FIM tokens that midfill knows: name them with --fim-tokens"
        )
    if format.order != "psm":
        raise MidfillError(
            f"there is nothing to measure: {format.name} reads the suffix first, so its prompts"
            " are never cut"
        )
    return tuple(
        Condition(distance_name(each), "distance", healing=True, least_increment=each)
        for each in distances
    )


def choose_cut(
    report: InfillingReport, *, score: str = "similarity", margin: float = 0.02
) -> CutChoice:
    """Choose the least increment from a report whose conditions are those of ``cut_conditions``.

    Raises:
        MidfillError: the report has other conditions, or lacks the score, or all its holes are of
            one function or file.
    """
    choice, other = half_of(report, "choice"), half_of(report, "report")
    if not choice.problems or not other.problems:
        raise MidfillError("all holes are of one function or file: there is nothing to choose from")
    on_choice, on_other = _scores(choice, score), _scores(other, score)
    best = max(on_choice, key=lambda each: (sum(on_choice[each]), -each))
    results = _results(choice, on_choice, best)
    return CutChoice(
        score=score,
        margin=margin,
        best=best,
        recommended=next(one.least_increment for one in results if one.difference.low >= -margin),
        choice=results,
        report=_results(other, on_other, best),
    )


def split_in_halves(groups: Sequence[str], seed: int) -> list[Half]:
    """Return the half that each hole is in; holes of a group are in the same one."""
    names = sorted(set(groups))
    random.Random(f"{seed}/halves").shuffle(names)
    chosen = set(names[: len(names) // 2])
    return ["choice" if group in chosen else "report" for group in groups]


def half_of(report: InfillingReport, half: Half) -> InfillingReport:
    """Return a report with one half of its holes."""
    halves = split_in_halves([problem.group for problem in report.problems], report.options.seed)
    kept = [index for index, own in enumerate(halves) if own == half]
    return msgspec.structs.replace(
        report,
        problems=[report.problems[index] for index in kept],
        outcomes={
            name: [outcomes[index] for index in kept] for name, outcomes in report.outcomes.items()
        },
    )


def _scores(report: InfillingReport, score: str) -> dict[int, list[float]]:
    """Return one value per hole, by distance in ascending order."""
    scores: dict[int, list[float]] = {}
    for name, outcomes in report.outcomes.items():
        if name != WHOLE and not name.isdigit():
            raise MidfillError(f"condition {name!r} is no distance: see 'midfill eval cuts --help'")
        if not all(score in one.scores for one in outcomes):
            known = [each for each in SCORES if all(each in one.scores for one in outcomes)]
            raise MidfillError(
                f"--score {score}: not all of these tasks have it; they have {', '.join(known)}"
            )
        distance = MAX_LEAST_INCREMENT if name == WHOLE else int(name)
        scores[distance] = [one.scores[score] for one in outcomes]
    return dict(sorted(scores.items()))


def _results(
    report: InfillingReport, scores: Mapping[int, Sequence[float]], best: int
) -> list[CutResult]:
    groups = [problem.group for problem in report.problems]
    return [
        CutResult(
            distance,
            estimate_mean(values, groups),
            estimate_difference(scores[best], values, groups),
        )
        for distance, values in scores.items()
    ]
