"""Reports as tables, Markdown, plots, and JSON files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from midfill.errors import MidfillError
from midfill_lab.evaluation.evaluate import InfillingReport
from midfill_lab.evaluation.problems import Task
from midfill_lab.evaluation.summary import (
    SCORES,
    Comparison,
    Estimate,
    baseline_of,
    differences,
    summarise,
    tasks_of,
)
from midfill_lab.reporting import ResultTable, write_json

LEGEND = "Percent with 95% intervals (bootstrap over functions or files, paired for differences)."


@dataclass(frozen=True)
class ReportTables:
    """Tables of results, with a caption below the last one.

    Attributes:
        tables: each with a title.
        caption: how the results were measured.
    """

    tables: Sequence[ResultTable]
    caption: str

    def drawn(self) -> list[Table]:
        """Return the tables for the terminal."""
        drawn = [_drawn(table) for table in self.tables]
        drawn[-1].caption = self.caption
        return drawn

    def markdown(self) -> str:
        """Return the tables for a document, each below its title."""
        titled = [f"{table.title}:\n\n{table.markdown()}" for table in self.tables]
        return "\n\n".join([*titled, self.caption])


def report_tables(report: InfillingReport) -> ReportTables:
    """Return tables of each task's scores, and of their differences from the baseline."""
    return ReportTables(list(_score_tables(report)), _caption(report))


def comparison_tables(
    comparisons: Mapping[Task, Mapping[str, Mapping[str, Comparison]]], models: str = ""
) -> ReportTables:
    """Return tables for each task, with a row per condition and score.

    Args:
        comparisons: made by ``compare_reports``.
        models: begins the caption.
    """
    return ReportTables(list(_comparison_tables(comparisons)), models + LEGEND)


def _comparison_tables(
    comparisons: Mapping[Task, Mapping[str, Mapping[str, Comparison]]],
) -> Iterator[ResultTable]:
    for task, conditions in comparisons.items():
        rows = [
            {
                "condition": condition,
                "score": SCORES[name],
                "first": f"{100 * found.first.value:.1f}",
                "second": f"{100 * found.second.value:.1f}",
                "second - first": estimate_cell(found.difference, signed=True),
            }
            for condition, scores in conditions.items()
            for name, found in scores.items()
        ]
        count = next(iter(next(iter(conditions.values())).values())).first.count
        yield ResultTable(title=f"{task}, {count} holes in both", rows=rows, labels=2)


def plot_report(report: InfillingReport, path: Path) -> None:
    """Plot bars with intervals, one panel per task; the file's suffix chooses the format."""
    from matplotlib.figure import Figure

    tasks = tasks_of(report)
    figure = Figure(figsize=(11, 3.2 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 1, squeeze=False)
    for axes, task in zip(panels[:, 0], tasks, strict=True):
        summary = summarise(report, task)
        names = list(next(iter(summary.values())))
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            found = [scores[name] for scores in summary.values()]
            at = [index + (number - (len(names) - 1) / 2) * width for index in range(len(found))]
            values = [100 * estimate.value for estimate in found]
            below = [max(0.0, 100 * (e.value - e.low)) for e in found]
            above = [max(0.0, 100 * (e.high - e.value)) for e in found]
            axes.bar(at, values, width, yerr=[below, above], label=SCORES[name], capsize=2)
        axes.set_xticks(range(len(summary)), list(summary))
        axes.set_ylim(0, 100)
        axes.set_ylabel("percent")
        axes.set_title(_title(report, task))
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(report.model, fontsize="medium")
    figure.savefig(path, dpi=130)


def write_report(report: InfillingReport, path: Path, *, finished: bool) -> None:
    """Write a report as JSON, with summaries if it is finished; the file is replaced as a whole.

    Raises:
        MidfillError: it can't be written.
    """
    summaries = {
        task: {"scores": summarise(report, task), "differences": differences(report, task)}
        for task in (tasks_of(report) if finished else ())
    }
    write_json(path, {"summary": summaries, **msgspec.to_builtins(report)})


def read_report(path: Path) -> InfillingReport:
    """Read a report from JSON.

    Raises:
        MidfillError: the file can't be read or is not a report.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=InfillingReport)
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MidfillError(f"{path} is not a report of 'midfill eval infilling': {error}") from None


def _score_tables(report: InfillingReport) -> Iterator[ResultTable]:
    base = baseline_of(report)
    for task in tasks_of(report):
        rows = score_rows(summarise(report, task))
        yield ResultTable(title=_title(report, task), rows=rows)
        if rows := score_rows(differences(report, task), signed=True):
            yield ResultTable(title=f"{task}, minus {base}", rows=rows)


def score_rows(
    conditions: Mapping[str, Mapping[str, Estimate]], *, signed: bool = False
) -> list[dict[str, str]]:
    """Return a row per condition, with a cell per score."""
    return [
        {
            "condition": condition,
            **{SCORES[name]: estimate_cell(score, signed=signed) for name, score in scores.items()},
        }
        for condition, scores in conditions.items()
    ]


def _title(report: InfillingReport, task: Task) -> str:
    count = sum(problem.task == task for problem in report.problems)
    return f"{task}, {count} holes"


def estimate_cell(estimate: Estimate, *, signed: bool = False) -> str:
    """Return a mean and its interval in percent."""
    sign = "+" if signed else ""
    parts = (estimate.value, estimate.low, estimate.high)
    value, low, high = (round(100 * part, 1) + 0.0 for part in parts)  # no -0.0
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def figure_cell(estimate: Estimate, *, signed: bool = False) -> str:
    """Return a mean and its interval as they are."""
    sign = "+" if signed else ""
    value, low, high = (
        round(part, 2) + 0.0 for part in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def _caption(report: InfillingReport) -> str:
    options = report.options
    typed = ", increments tokenised as typed" if options.typed else ""
    ran = f", programs run with {report.isolation}" if report.isolation else ""
    return (
        f"{report.model}; at most {options.before} characters before and {options.after} after the"
        f" caret, greedy, seed {options.seed}{typed}{ran}. {LEGEND}"
    )


def _drawn(table: ResultTable) -> Table:
    """Return a table for the terminal."""
    if table.labels == 1:
        # Intervals go below their values: beside them, the table would be too wide.
        rows = [
            {head: cell.replace(" [", "\n[") for head, cell in row.items()} for row in table.rows
        ]
        table = replace(table, rows=rows)
    drawn = table.drawn(title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for column in drawn.columns[: table.labels]:
        column.no_wrap = True
    return drawn
