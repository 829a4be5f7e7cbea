"""Results of ``eval cuts`` as tables, Markdown, plots, and what is noted beside a model."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.table import Table

from midfill.evaluation.bootstrap import estimate_difference
from midfill.evaluation.cuts import CutChoice, CutResult, distance_name, half_of
from midfill.evaluation.problems import Task
from midfill.evaluation.report import (
    LEGEND,
    estimate_cell,
    rich_table,
    score_rows,
    titled_markdown,
)
from midfill.evaluation.run import InfillingReport
from midfill.evaluation.summary import SCORES, summarise, tasks_of
from midfill.reporting.result_table import ResultTable
from midfill.system.machine import describe_machine
from midfill.version import __version__


def cut_tables(report: InfillingReport, choice: CutChoice) -> list[Table]:
    """Return tables for the terminal: each task's scores by distance, and the choice."""
    tables = [rich_table(table) for table in _tables(report, choice)]
    tables[-1].caption = _caption(report, choice)
    return tables


def cut_markdown(report: InfillingReport, choice: CutChoice) -> str:
    """Return the tables for a document."""
    parts = map(titled_markdown, _tables(report, choice))
    return "\n\n".join([*parts, _caption(report, choice)])


def plot_cuts(report: InfillingReport, choice: CutChoice, path: Path) -> None:
    """Plot the score against the distance, on either half; the file's suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = [distance_name(one.least_increment) for one in choice.choice]
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
    axes.axvline(names.index(distance_name(choice.recommended)), color="grey", linestyle=":")
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("characters before the caret that follow the suffix, at least")
    axes.set_ylabel(f"{SCORES[choice.score]}, percent")
    axes.set_title(report.model, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def cut_measurement(report: InfillingReport, choice: CutChoice) -> dict[str, object]:
    """Return how a cut was measured, to be noted beside the model; plain values."""
    return {
        "made_with": f"midfill {__version__}",
        "date": datetime.date.today().isoformat(),
        "machine": str(describe_machine()),
        "model": report.model,
        "holes": {task: len(_of_task(report, task)) for task in tasks_of(report)},
        "characters": [report.options.before, report.options.after],
        "seed": report.options.seed,
        "score": choice.score,
        "margin": choice.margin,
        "best": distance_name(choice.best),
        "minus_best_on_other_holes": {
            distance_name(one.least_increment): msgspec.to_builtins(one.difference)
            for one in choice.report
        },
    }


def _tables(report: InfillingReport, choice: CutChoice) -> Iterator[ResultTable]:
    other = half_of(report, "report")
    best = distance_name(choice.best)
    for task in tasks_of(other):
        summary = summarise(other, task)
        title = f"{task}, {len(_of_task(other, task))} holes that nothing was chosen on"
        yield _by_distance(ResultTable(title=title, rows=score_rows(summary)))
        indices = _of_task(other, task)
        groups = [other.problems[index].group for index in indices]
        values = {
            name: {
                score: [outcomes[index].scores[score] for index in indices]
                for score in summary[name]
            }
            for name, outcomes in other.outcomes.items()
        }
        minus = {
            name: {
                score: estimate_difference(values[best][score], found, groups)
                for score, found in scores.items()
            }
            for name, scores in values.items()
            if name != best
        }
        rows = score_rows(minus, signed=True)
        yield _by_distance(ResultTable(title=f"{task}, minus {best}", rows=rows))
    yield ResultTable(title="All tasks", rows=list(map(_choice_row, choice.choice, choice.report)))


def _choice_row(chosen: CutResult, other: CutResult) -> dict[str, str]:
    return {
        "distance": distance_name(chosen.least_increment),
        "chosen from": estimate_cell(chosen.score),
        "minus best": estimate_cell(chosen.difference, signed=True),
        "other holes": estimate_cell(other.score),
        "minus the same": estimate_cell(other.difference, signed=True),
    }


def _by_distance(table: ResultTable) -> ResultTable:
    """Return a table of conditions with its first column named for what they are."""
    rows = [{"distance": row["condition"], **row} for row in table.rows]
    for row in rows:
        del row["condition"]
    return ResultTable(title=table.title, rows=rows)


def _of_task(report: InfillingReport, task: Task) -> list[int]:
    return [index for index, problem in enumerate(report.problems) if problem.task == task]


def _caption(report: InfillingReport, choice: CutChoice) -> str:
    options = report.options
    other = estimate_cell(choice.on_other_holes, signed=True)
    return (
        f"Least increment: {distance_name(choice.recommended)}, the least distance whose "
        f"{SCORES[choice.score]} is below that of the best, {distance_name(choice.best)}, by at "
        f"most {100 * choice.margin:g} points (lower end of the interval, on "
        f"{choice.choice[0].score.count} holes). On the other {choice.report[0].score.count} holes "
        f"it is at {other} of it. {report.model}; at most {options.before} characters before and "
        f"{options.after} after the caret, greedy, healed, seed {options.seed}. {LEGEND}"
    )
