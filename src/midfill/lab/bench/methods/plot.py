"""Pareto plots: quality against the share of slots that a method holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from midfill.lab.bench.methods.results import MethodsReport, ModelResult
from midfill.lab.bench.methods.summary import exact_holes, held_share, prediction, recall
from midfill.lab.bench.methods.variants import FULL, Variant


class _Panel(NamedTuple):
    """A measure over the slots held; None where it was not measured."""

    title: str
    ordinate: str
    measure: Callable[[ModelResult, str], float | None]
    logarithmic: bool = False


def plot_methods(report: MethodsReport, path: Path) -> None:
    """Plot a report, a row of panels per model; the file's ending is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = max(len(report.models), 1)
    figure, axes = pyplot.subplots(
        rows, len(_PANELS), figsize=(15, 4.2 * rows), layout="constrained", squeeze=False
    )
    for row, result in zip(axes, report.models, strict=False):
        for panel, place in zip(_PANELS, row, strict=True):
            _draw(place, panel, report.variants, result)
        row[0].annotate(
            result.model, (0, 1.12), xycoords="axes fraction", fontsize=11, weight="bold"
        )
    handles, names = axes[0][1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axes: Any, panel: _Panel, variants: list[Variant], result: ModelResult) -> None:
    """Draw one line per method through its budgets, and full KV's level."""
    from matplotlib.ticker import LogLocator

    for number, method in enumerate(dict.fromkeys(one.method for one in variants)):
        points = []
        for variant in variants:
            share = held_share(result, variant.specification)
            value = panel.measure(result, variant.specification)
            if variant.method == method and share is not None and value is not None:
                points.append((share, value))
        points.sort()
        axes.plot(
            [share for share, _ in points],
            [value for _, value in points],
            marker="osD^vPX*<>"[number % 10],
            color=f"C{number % 10}",
            linestyle=("-", "--", ":")[number // 10 % 3],
            label=method,
        )
    level = panel.measure(result, FULL)
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    elif level is not None:
        axes.axhline(level, color="black", linewidth=0.8, linestyle="--", label="full KV")
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("slots held after prefill, share of full KV's")
    axes.set_ylabel(panel.ordinate)
    axes.set_xlim(0, 1.03)
    axes.grid(alpha=0.3)


def _logprob(*tasks: str) -> Callable[[ModelResult, str], float | None]:
    def measure(result: ModelResult, specification: str) -> float | None:
        found = recall(result, specification, tasks)  # type: ignore[arg-type]
        return None if found is None else found.logprob

    return measure


def _divergence(result: ModelResult, specification: str) -> float | None:
    found = prediction(result, specification)
    return None if found is None else found.divergence


_ORDINATE = "mean log-probability of the answer"
_PANELS = (
    _Panel("held-out code: lower is better", "KL from full KV, nats", _divergence, True),
    _Panel("needles, question seen", _ORDINATE, _logprob("needle", "multi-key")),
    _Panel("shared contexts, question not seen", _ORDINATE, _logprob("requests")),
    _Panel("lines filled in exactly", "share", exact_holes),
)
