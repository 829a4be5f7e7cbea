"""Choices among conditions as tables, plots, and what is noted beside a model."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midfill.lab.evaluation.bootstrap import estimate_difference
from midfill.lab.evaluation.choice import Choice, ChoiceResult, half_of
from midfill.lab.evaluation.problems import Task
from midfill.lab.evaluation.report import LEGEND, estimate_cell, score_rows
from midfill.lab.evaluation.run import InfillingReport
from midfill.lab.evaluation.summary import SCORES, summarise, tasks_of
from midfill.system.machine import describe_machine
from midfill.system.reporting import ResultTable
from midfill.version import __version__


@dataclass(frozen=True)
class ChoiceWords:
    """How a choice is described.

    Attributes:
        one: what a condition is, such as "distance".
        axis: of the plot.
        recommendation: what is recommended, such as "Least increment".
        cheapest: the cheapest that is as good, such as "the least distance".
        prompts: how the prompts were made.
    """

    one: str
    axis: str
    recommendation: str
    cheapest: str
    prompts: str


Cells = Mapping[str, Mapping[str, str]]
"""Condition -> further cells of its row."""


def choice_result_tables(
    report: InfillingReport,
    choice: Choice,
    words: ChoiceWords,
    cells: Mapping[Task, Cells] | None = None,
) -> Iterator[ResultTable]:
    """Yield tables of the holes that nothing was chosen on, task by task, and of the choice.

    Args:
        report: all holes.
        choice: what was chosen.
        words: how to describe it.
        cells: further cells of each task's table of scores.
    """
    other = half_of(report, "report")
    for task in tasks_of(other):
        summary = summarise(other, task)
        title = f"{task}, {len(indices_of_task(other, task))} holes that nothing was chosen on"
        rows = _named(score_rows(summary), words.one, (cells or {}).get(task, {}))
        yield ResultTable(title=title, rows=rows)
        rows = _named(_difference_rows(other, task, choice.best), words.one, {})
        yield ResultTable(title=f"{task}, minus {choice.best}", rows=rows)
    rows = [
        _choice_row(words.one, *pair) for pair in zip(choice.choice, choice.report, strict=True)
    ]
    yield ResultTable(title="All tasks", rows=rows)


def choice_caption(report: InfillingReport, choice: Choice, words: ChoiceWords) -> str:
    """Return what was chosen, why, and how it was measured."""
    other = estimate_cell(choice.on_other_holes, signed=True)
    return (
        f"{words.recommendation}: {choice.recommended}, {words.cheapest} whose "
        f"{SCORES[choice.score]} is below that of the best, {choice.best}, by at "
        f"most {100 * choice.margin:g} points (lower end of the interval, on "
        f"{choice.choice[0].score.count} holes). On the other {choice.report[0].score.count} holes "
        f"it is at {other} of it. {report.model}; {words.prompts}, greedy, healed, "
        f"seed {report.options.seed}. {LEGEND}"
    )


def plot_choice(report: InfillingReport, choice: Choice, words: ChoiceWords, path: Path) -> None:
    """Plot the score by condition, on either half; the file's suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = [one.condition for one in choice.choice]
    for label, results in (("chosen from", choice.choice), ("other holes", choice.report)):
        values = [100 * one.score.value for one in results]
        (line,) = axes.plot(values, marker="o", label=f"{label}, {results[0].score.count} holes")
        axes.fill_between(
            range(len(results)),
            [100 * one.score.low for one in results],
            [100 * one.score.high for one in results],
            color=line.get_color(),
            alpha=0.15,
        )
    axes.axvline(names.index(choice.recommended), color="grey", linestyle=":")
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel(words.axis)
    axes.set_ylabel(f"{SCORES[choice.score]}, percent")
    axes.set_title(report.model, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def choice_measurement(report: InfillingReport, choice: Choice) -> dict[str, object]:
    """Return how a choice was measured, to be noted beside the model; plain values."""
    return {
        "made_with": f"midfill {__version__}",
        "date": datetime.date.today().isoformat(),
        "machine": str(describe_machine()),
        "model": report.model,
        "holes": {task: len(indices_of_task(report, task)) for task in tasks_of(report)},
        "seed": report.options.seed,
        "score": choice.score,
        "margin": choice.margin,
        "best": choice.best,
        "minus_best_on_other_holes": {
            one.condition: msgspec.to_builtins(one.difference) for one in choice.report
        },
    }


def indices_of_task(report: InfillingReport, task: Task) -> list[int]:
    """Return the indices of a task's holes."""
    return [index for index, problem in enumerate(report.problems) if problem.task == task]


def _difference_rows(report: InfillingReport, task: Task, best: str) -> list[dict[str, str]]:
    """Return a row for each condition but the best one: its scores minus the best one's."""
    indices = indices_of_task(report, task)
    groups = [report.problems[index].group for index in indices]
    scores = list(next(iter(summarise(report, task).values())))

    def values(condition: str, score: str) -> list[float]:
        return [report.outcomes[condition][index].scores[score] for index in indices]

    minus = {
        name: {
            score: estimate_difference(values(best, score), values(name, score), groups)
            for score in scores
        }
        for name in report.outcomes
        if name != best
    }
    return score_rows(minus, signed=True)


def _choice_row(one: str, chosen: ChoiceResult, other: ChoiceResult) -> dict[str, str]:
    return {
        one: chosen.condition,
        "chosen from": estimate_cell(chosen.score),
        "minus best": estimate_cell(chosen.difference, signed=True),
        "other holes": estimate_cell(other.score),
        "minus the same": estimate_cell(other.difference, signed=True),
    }


def _named(rows: Sequence[dict[str, str]], one: str, cells: Cells) -> list[dict[str, str]]:
    """Return rows of conditions with their first column named for what they are."""
    return [
        {
            one: row["condition"],
            **cells.get(row["condition"], {}),
            **{name: cell for name, cell in row.items() if name != "condition"},
        }
        for row in rows
    ]
