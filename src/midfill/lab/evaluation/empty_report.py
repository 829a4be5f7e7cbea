"""Results of ``eval empty`` as tables, Markdown, plots, and what is noted beside a model."""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from midfill.lab.evaluation.empties import (
    CaretResult,
    EmptyChoice,
    EmptyRates,
    estimate,
    rates,
    separation,
)
from midfill.lab.evaluation.report import LEGEND, estimate_cell, rich_table, titled_markdown
from midfill.lab.evaluation.run import InfillingReport
from midfill.lab.evaluation.summary import tasks_of
from midfill.system.machine import describe_machine
from midfill.system.reporting import ResultTable
from midfill.version import __version__

_THRESHOLDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


def empty_tables(report: InfillingReport, choice: EmptyChoice) -> list[Table]:
    """Return tables for the terminal: each kind of carets, and what other thresholds give."""
    tables = [rich_table(table) for table in _tables(report, choice)]
    tables[-1].caption = _caption(report, choice)
    return tables


def empty_markdown(report: InfillingReport, choice: EmptyChoice) -> str:
    """Return the tables for a document."""
    return "\n\n".join([*map(titled_markdown, _tables(report, choice)), _caption(report, choice)])


def plot_empty(report: InfillingReport, choice: EmptyChoice, path: Path) -> None:
    """Plot the share of empty answers against the threshold; the suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    thresholds = np.geomspace(1e-4, 1.0, 200)
    for label, missing, colour in (("something", True, "C3"), ("nothing", False, "C0")):
        for results, style in ((choice.reported_on, "-"), (choice.chosen_on, ":")):
            found = np.array([one.probability for one in results if one.missing == missing])
            if len(found):
                shares = [100 * float(np.mean(found > each)) for each in thresholds]
                name = f"{label} is missing{', chosen from' if style == ':' else ''}"
                axes.plot(thresholds, shares, style, color=colour, label=name)
    axes.axvline(choice.threshold, color="grey", linestyle=":")
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.set_xlabel("threshold")
    axes.set_ylabel("probability of an empty answer above it, percent")
    axes.set_title(report.model, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def empty_measurement(report: InfillingReport, choice: EmptyChoice) -> dict[str, object]:
    """Return how a threshold was measured, to be noted beside the model; plain values."""
    results = choice.reported_on
    found = {
        name: rates(results, threshold)
        for name, threshold in (("without", 0.0), ("with", choice.threshold))
    }
    return {
        "made_with": f"midfill {__version__}",
        "date": datetime.date.today().isoformat(),
        "machine": str(describe_machine()),
        "model": report.model,
        "holes": {task: _count(report, task) for task in tasks_of(report)},
        "seed": report.options.seed,
        "characters": [report.options.before, report.options.after],
        "most_lost": choice.limit,
        "separation": round(separation(results), 3),
        "empty_on_other_holes": {
            name: {
                "missing": msgspec.to_builtins(one.missing),
                "nothing": msgspec.to_builtins(one.nothing),
            }
            for name, one in found.items()
        },
    }


def _tables(report: InfillingReport, choice: EmptyChoice) -> Iterator[ResultTable]:
    results = choice.reported_on
    kinds = [(str(task), [one for one in results if one.task == task]) for task in tasks_of(report)]
    for title, missing in (("Something is missing", True), ("Nothing is missing", False)):
        own = [(name, part) for name, part in kinds if part and part[0].missing == missing]
        if len(own) > 1:
            own.append(("all", [one for one in results if one.missing == missing]))
        rows = [_kind_row(name, part, choice.threshold) for name, part in own]
        count = sum(one.missing == missing for one in results)
        yield ResultTable(title=f"{title}, {count} carets{_on_which(choice)}", rows=rows)
    thresholds = sorted({*_THRESHOLDS, choice.threshold})
    rows = [_threshold_row(choice, each) for each in thresholds]
    yield ResultTable(title="Empty answers by threshold", rows=rows)


def _kind_row(name: str, results: Sequence[CaretResult], threshold: float) -> dict[str, str]:
    quantiles = np.quantile([one.probability for one in results], list(_QUANTILES.values()))
    row = {
        "caret": name,
        "carets": str(len(results)),
        **{name: f"{value:.2g}" for name, value in zip(_QUANTILES, quantiles, strict=True)},
        "empty, off": estimate_cell(estimate(results, "empty", 0.0)),
        f"empty, {threshold:g}": estimate_cell(estimate(results, "empty", threshold)),
    }
    if results[0].missing:
        row["exact, off"] = estimate_cell(estimate(results, "exact", 0.0))
        row[f"exact, {threshold:g}"] = estimate_cell(estimate(results, "exact", threshold))
    return row


def _threshold_row(choice: EmptyChoice, threshold: float) -> dict[str, str]:
    names = {0.0: "off", 1.0: "1 (never empty)", choice.threshold: f"{choice.threshold:g} (chosen)"}
    if choice.limit is None:
        names[choice.threshold] = f"{choice.threshold:g} (given)"
    row = {"threshold": names.get(threshold, f"{threshold:g}")}
    if choice.chosen_on:
        row |= _rate_cells(rates(choice.chosen_on, threshold), ", chosen from")
    return row | _rate_cells(rates(choice.reported_on, threshold), "")


def _rate_cells(found: EmptyRates, which: str) -> dict[str, str]:
    return {
        f"missing{which}": estimate_cell(found.missing),
        f"nothing{which}": estimate_cell(found.nothing),
    }


def _caption(report: InfillingReport, choice: EmptyChoice) -> str:
    options = report.options
    missing = sum(one.missing for one in choice.chosen_on)
    how = (
        ""
        if choice.limit is None
        else f", the smallest that loses at most {100 * choice.limit:g}% of {missing} answers where"
        " something is missing"
    )
    return (
        f"Threshold: {choice.threshold:g}{how}. p10, median and p90 are of the probability of an"
        " empty answer; of a caret where something and one where nothing is missing, the second"
        f" has the higher one in {100 * separation(choice.reported_on):.1f}% of pairs."
        f" {report.model}; at most"
        f" {options.before} characters before and {options.after} after the caret, greedy, healed,"
        f" seed {options.seed}. {LEGEND}"
    )


def _on_which(choice: EmptyChoice) -> str:
    return " that nothing was chosen on" if choice.chosen_on else ""


def _count(report: InfillingReport, task: str) -> int:
    return sum(problem.task == task for problem in report.problems)
