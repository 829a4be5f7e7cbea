"""The plot of a run: what each family of methods loses in turns and in requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midfill.methods.registry import KINDS, METHODS, parse_name, split_methods
from midfill_lab.bench.scbench.report import (
    AGREEMENT,
    CONDITIONS,
    LOGPROB,
    LengthResults,
    Measure,
)
from midfill_lab.bench.scbench.results import SCBenchReport

_TITLES = {
    "evict": "eviction",
    "quantize": "fewer bits",
    "prefill": "sparse prefill",
    "reuse": "KV from elsewhere",
    "rows": "fewer rows",
}
_ORDINATES = (
    (LOGPROB, "log-probability lost,\nnats per token"),
    (AGREEMENT, "other answers, share"),
)
_LINE = 12
"""Methods in a line of panels."""
_WIDTH = 0.8
"""Of a method's bars together; methods are 1 apart."""


def families(methods: Sequence[str]) -> dict[str, list[str]]:
    """Return the specifications by the kind of their first method, in the order of the kinds."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for method in methods:
        found[METHODS[parse_name(split_methods(method)[0])].kind].append(method)
    return {kind: names for kind, names in found.items() if names}


def plot_scbench(report: SCBenchReport, path: Path) -> None:
    """Plot a panel per family, with two measures for each length; the file's ending is the format.

    Raises:
        ValueError: no method but full KV was measured.
    """
    from matplotlib.figure import Figure

    groups = families(report.methods[1:])
    if not groups:
        raise ValueError("there is nothing to plot beside full KV")
    places = []
    for length in report.options.lengths:
        results = LengthResults(report, length)
        for line in lines_of(groups):
            for measure, ordinate in _ORDINATES:
                known = [kind for kind in line if _is_known(results, groups[kind], measure)]
                if known:
                    places.append((length, measure, ordinate, known))
    widest = max(sum(len(groups[kind]) + 1 for kind in line) for *_, line in places)
    figure = Figure(figsize=(4 + widest, 3.2 * len(places)), layout="constrained")
    parts: Any = figure.subfigures(len(places), 1, squeeze=False)
    for (part,), (length, measure, ordinate, line) in zip(parts, places, strict=True):
        results = LengthResults(report, length)
        widths = [len(groups[kind]) + 1 for kind in line]
        row = part.subplots(1, len(line), squeeze=False, sharey="row", width_ratios=widths)[0]
        for axes, kind in zip(row, line, strict=True):
            _draw(axes, results, groups[kind], measure)
            axes.set_title(f"{_TITLES.get(kind, kind)}, {length:,} tokens", fontsize=10)
        row[0].set_ylabel(ordinate)
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(CONDITIONS))
    figure.savefig(path, dpi=130)


def lines_of(groups: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return which families are drawn beside each other: as many as stay readable."""
    lines: list[list[str]] = []
    room = 0
    for kind, methods in groups.items():
        if len(methods) > room:
            lines.append([])
            room = max(_LINE, len(methods))
        lines[-1].append(kind)
        room -= len(methods)
    return lines


def _is_known(results: LengthResults, methods: Sequence[str], measure: Measure) -> bool:
    """Return whether any of some methods has a measure in any condition."""
    return any(
        results.change(method, condition, measure) is not None
        for method in methods
        for condition in CONDITIONS
    )


def _draw(axes: Any, results: LengthResults, methods: Sequence[str], measure: Measure) -> None:
    """Draw bars with intervals: per method, one for each condition."""
    width = _WIDTH / len(CONDITIONS)
    sign = -1.0 if measure is LOGPROB else 1.0
    for number, condition in enumerate(CONDITIONS):
        found = [results.change(method, condition, measure) for method in methods]
        places = [place + (number + 0.5) * width - _WIDTH / 2 for place in range(len(methods))]
        axes.bar(
            places,
            [0.0 if one is None else sign * one.mean for one in found],
            width,
            yerr=[0.0 if one is None else one.reach or 0.0 for one in found],
            error_kw={"elinewidth": 0.8},
            color=f"C{number}",
            label=condition.title,
        )
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(methods)), methods, rotation=20, ha="right", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
