"""Results of ``eval windows``: tables, Markdown, plots, JSON, and what is noted beside a model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import msgspec
from rich.table import Table

from midfill.evaluation.choice import Choice, indices_of_half
from midfill.evaluation.choice_report import (
    Cells,
    ChoiceWords,
    choice_caption,
    choice_measurement,
    choice_result_tables,
    plot_choice,
)
from midfill.evaluation.problems import Task
from midfill.evaluation.report import rich_table, titled_markdown
from midfill.evaluation.run import InfillingReport
from midfill.evaluation.summary import tasks_of
from midfill.evaluation.windows import WindowCost
from midfill.reporting.publish import write_json
from midfill.reporting.result_table import ResultTable

Costs = Mapping[str, Sequence[WindowCost]]
"""Window -> the cost of each hole, in the order of the report's."""

_FIELDS = {"cold": "tokens, opened", "moved": "caret moved", "typed": "typed"}


def window_tables(
    report: InfillingReport, choice: Choice, costs: Costs, shortest: int
) -> list[Table]:
    """Return tables for the terminal: each task's costs and scores by window, and the choice."""
    words = _words(shortest)
    tables = [rich_table(table) for table in _tables(report, choice, costs, words)]
    tables[-1].caption = _caption(report, choice, costs, words)
    return tables


def window_markdown(report: InfillingReport, choice: Choice, costs: Costs, shortest: int) -> str:
    """Return the tables for a document."""
    words = _words(shortest)
    parts = map(titled_markdown, _tables(report, choice, costs, words))
    return "\n\n".join([*parts, _caption(report, choice, costs, words)])


def plot_windows(report: InfillingReport, choice: Choice, shortest: int, path: Path) -> None:
    """Plot the score against the window, on either half; the file's suffix chooses the format."""
    plot_choice(report, choice, _words(shortest), path)


def window_measurement(
    report: InfillingReport, choice: Choice, costs: Costs, shortest: int
) -> dict[str, object]:
    """Return how a window was measured, to be noted beside the model; plain values."""
    return {
        **choice_measurement(report, choice),
        "shortest_file": shortest,
        "mean_tokens": {
            name: {field: round(mean(_values(found, field)), 1) for field in _FIELDS}
            for name, found in costs.items()
        },
    }


def write_windows(report: InfillingReport, costs: Costs, path: Path) -> None:
    """Write the report and the costs as JSON; 'midfill eval show' reads it, too."""
    write_json(path, {**msgspec.to_builtins(report), "costs": msgspec.to_builtins(costs)})


def _tables(
    report: InfillingReport, choice: Choice, costs: Costs, words: ChoiceWords
) -> Iterator[ResultTable]:
    return choice_result_tables(report, choice, words, _cells(report, costs))


def _cells(report: InfillingReport, costs: Costs) -> dict[Task, Cells]:
    """Return what each window's requests compute, over the holes that the tables show."""
    shown = indices_of_half(report, "report")
    cells: dict[Task, Cells] = {}
    for task in tasks_of(report):
        indices = [index for index in shown if report.problems[index].task == task]
        cells[task] = {
            name: {
                title: f"{mean(_values([found[index] for index in indices], field)):.0f}"
                for field, title in _FIELDS.items()
            }
            for name, found in costs.items()
            if indices
        }
    return cells


def _values(costs: Sequence[WindowCost], field: str) -> list[int]:
    return [getattr(cost, field) for cost in costs]


def _caption(report: InfillingReport, choice: Choice, costs: Costs, words: ChoiceWords) -> str:
    most = {
        name: ", ".join(f"{max(_values(found, field))} {field}" for field in _FIELDS)
        for name, found in costs.items()
    }
    return (
        f"{choice_caption(report, choice, words)} Tokens are those computed, means over holes;"
        f" the most of any hole with {choice.recommended}: {most[choice.recommended]}."
    )


def _words(shortest: int) -> ChoiceWords:
    return ChoiceWords(
        one="window",
        axis="characters before / after the caret",
        recommendation="Window",
        cheapest="the smallest",
        prompts=f"files of at least {shortest} characters, sent whole",
    )
