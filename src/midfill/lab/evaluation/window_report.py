"""Results of ``eval windows`` as tables, Markdown, plots, and what is noted beside a model."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from rich.table import Table

from midfill.lab.evaluation.choice import Choice, half_of
from midfill.lab.evaluation.choice_report import (
    Cells,
    ChoiceWords,
    choice_caption,
    choice_measurement,
    choice_result_tables,
    indices_of_task,
    plot_choice,
)
from midfill.lab.evaluation.problems import Task
from midfill.lab.evaluation.report import rich_table, titled_markdown
from midfill.lab.evaluation.run import InfillingReport, Outcome
from midfill.lab.evaluation.summary import tasks_of

_FIELDS = {"opened": "tokens, opened", "moved": "caret moved", "typed": "typed"}


def window_tables(report: InfillingReport, choice: Choice) -> list[Table]:
    """Return tables for the terminal: each task's costs and scores by window, and the choice."""
    found = choice_result_tables(report, choice, _words(report), _cells(report))
    tables = [rich_table(table) for table in found]
    tables[-1].caption = _caption(report, choice)
    return tables


def window_markdown(report: InfillingReport, choice: Choice) -> str:
    """Return the tables for a document."""
    found = choice_result_tables(report, choice, _words(report), _cells(report))
    return "\n\n".join([*map(titled_markdown, found), _caption(report, choice)])


def plot_windows(report: InfillingReport, choice: Choice, path: Path) -> None:
    """Plot the score against the window, on either half; the file's suffix chooses the format."""
    plot_choice(report, choice, _words(report), path)


def window_measurement(report: InfillingReport, choice: Choice) -> dict[str, object]:
    """Return how a window was measured, to be noted beside the model; plain values."""
    return {
        **choice_measurement(report, choice),
        "shortest_file": report.options.shortest,
        "mean_tokens": {
            name: {field: round(mean(_tokens(outcomes, field)), 1) for field in _FIELDS}
            for name, outcomes in report.outcomes.items()
        },
    }


def _cells(report: InfillingReport) -> dict[Task, Cells]:
    """Return what each window's requests compute, over the holes that the tables show."""
    other = half_of(report, "report")
    cells: dict[Task, Cells] = {}
    for task in tasks_of(other):
        indices = indices_of_task(other, task)
        cells[task] = {
            name: {
                title: f"{mean(_tokens([outcomes[index] for index in indices], field)):.0f}"
                for field, title in _FIELDS.items()
            }
            for name, outcomes in other.outcomes.items()
        }
    return cells


def _tokens(outcomes: Sequence[Outcome], field: str) -> list[int]:
    return [getattr(one.cost, field) for one in outcomes if one.cost is not None]


def _caption(report: InfillingReport, choice: Choice) -> str:
    outcomes = report.outcomes[choice.recommended]
    most = ", ".join(f"{max(_tokens(outcomes, field))} {field}" for field in _FIELDS)
    return (
        f"{choice_caption(report, choice, _words(report))} Tokens are those computed, means over"
        f" holes; the most of any hole with {choice.recommended}: {most}."
    )


def _words(report: InfillingReport) -> ChoiceWords:
    return ChoiceWords(
        one="window",
        axis="characters before / after the caret",
        recommendation="Window",
        cheapest="the smallest",
        prompts=f"files of at least {report.options.shortest} characters, sent whole",
    )
