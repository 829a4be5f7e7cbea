"""Quality against the cut: how much text before the caret a model needs after the suffix.

Every hole is asked with the suffix at several distances before the caret, each at the place where
the planner would cut there (``infill/cut_places.py``). The least distance that is as good as the
best is chosen, see ``choice``.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from midfill.errors import MidfillError, OptionError
from midfill.infill.formats import FimFormat
from midfill.lab.evaluation.choice import (
    Choice,
    ChoiceWords,
    choice_caption,
    choice_measurement,
    choice_result_tables,
    choose_cheapest,
    plot_choice,
)
from midfill.lab.evaluation.conditions import Condition
from midfill.lab.evaluation.report import rich_table, titled_markdown
from midfill.lab.evaluation.run import InfillingReport
from midfill.models.checkpoints.model_record import MAX_LEAST_INCREMENT

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
) -> Choice:
    """Choose the distance from a report whose conditions are those of ``cut_conditions``.

    Raises:
        MidfillError: the report has other conditions, or lacks the score, or all its holes are of
            one function or file.
    """
    return choose_cheapest(report, sorted(report.outcomes, key=parse_distance), score, margin)


def cut_tables(report: InfillingReport, choice: Choice) -> list[Table]:
    """Return tables for the terminal: each task's scores by distance, and the choice."""
    words = _words(report)
    tables = [rich_table(table) for table in choice_result_tables(report, choice, words)]
    tables[-1].caption = choice_caption(report, choice, words)
    return tables


def cut_markdown(report: InfillingReport, choice: Choice) -> str:
    """Return the tables for a document."""
    words = _words(report)
    parts = map(titled_markdown, choice_result_tables(report, choice, words))
    return "\n\n".join([*parts, choice_caption(report, choice, words)])


def plot_cuts(report: InfillingReport, choice: Choice, path: Path) -> None:
    """Plot the score against the distance, on either half; the file's suffix chooses the format."""
    plot_choice(report, choice, _words(report), path)


def cut_measurement(report: InfillingReport, choice: Choice) -> dict[str, object]:
    """Return how a cut was measured, to be noted beside the model; plain values."""
    characters = [report.options.before, report.options.after]
    return {**choice_measurement(report, choice), "characters": characters}


def _words(report: InfillingReport) -> ChoiceWords:
    options = report.options
    return ChoiceWords(
        one="distance",
        axis="characters before the caret that follow the suffix, at least",
        recommendation="Least increment",
        cheapest="the least distance",
        prompts=f"at most {options.before} characters before and {options.after} after the caret",
    )
