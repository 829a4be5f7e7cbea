"""Quality against the cut: how much text before the caret a model needs after the suffix.

Every hole is asked with the suffix at several distances before the caret, each at the place where
the planner would cut there (``infill/cut_places.py``). The least distance that is as good as the
best is chosen, see ``choice``.
"""

from collections.abc import Sequence

from midfill.errors import MidfillError, OptionError
from midfill.infill.formats import FimFormat
from midfill.models.checkpoints.model_record import MAX_LEAST_INCREMENT
from midfill_lab.evaluation.choice import (
    MeasuredChoice,
    cheapest_caption,
    choose_cheapest,
)
from midfill_lab.evaluation.conditions import Condition, required
from midfill_lab.evaluation.evaluate import InfillingReport

WHOLE = "whole"
DEFAULT_DISTANCES = "0,32,96,200,400,800,whole"


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
            raise OptionError(
                f"--distances takes characters and 'whole', like {DEFAULT_DISTANCES}, not {part!r}"
            )
    if len(distances) < 2:
        raise OptionError("--distances names one distance; there is nothing to choose from")
    return tuple(sorted(distances))


def distance_name(distance: int) -> str:
    """Return a distance's name in tables."""
    return WHOLE if distance >= MAX_LEAST_INCREMENT else str(distance)


def parse_distance(name: str) -> int:
    """Return the distance that a condition is named for.

    Raises:
        MidfillError: it is no distance.
    """
    if name != WHOLE and not name.isdigit():
        raise MidfillError(f"condition {name!r} is no distance: see 'midfill eval cuts --help'")
    return MAX_LEAST_INCREMENT if name == WHOLE else int(name)


def cut_conditions(distances: Sequence[int], format: FimFormat | None) -> tuple[Condition, ...]:
    """Return a condition for each distance.

    Raises:
        MidfillError: the model's prompts are not cut.
    """
    format = required(format)
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
) -> MeasuredChoice:
    """Choose the distance from a report whose conditions are those of ``cut_conditions``.

    Raises:
        MidfillError: the report has other conditions, or lacks the score, or all its holes are of
            one function or file.
    """
    names = sorted(report.outcomes, key=parse_distance)
    choice = choose_cheapest(report, names, score, margin)
    before, after = report.options.before, report.options.after
    prompts = f"at most {before} characters before and {after} after the caret"
    return MeasuredChoice(
        report=report,
        choice=choice,
        column="distance",
        axis="characters before the caret that follow the suffix, at least",
        caption=cheapest_caption(report, choice, "Least increment", "the least distance", prompts),
        notes={"characters": [before, after]},
    )
