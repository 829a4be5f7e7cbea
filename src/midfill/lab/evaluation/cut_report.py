"""Results of ``eval cuts`` as tables, Markdown, plots, and what is noted beside a model."""

from pathlib import Path

from rich.table import Table

from midfill.lab.evaluation.choice import Choice
from midfill.lab.evaluation.choice_report import (
    ChoiceWords,
    choice_caption,
    choice_measurement,
    choice_result_tables,
    plot_choice,
)
from midfill.lab.evaluation.report import rich_table, titled_markdown
from midfill.lab.evaluation.run import InfillingReport


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
