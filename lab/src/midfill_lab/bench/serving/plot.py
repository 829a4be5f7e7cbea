"""Plots of a serving load: latency against time, and distributions."""

from pathlib import Path
from typing import Any

import numpy as np

from midfill_lab.bench.serving.metrics import OK, RequestResult
from midfill_lab.bench.serving.report import ServingReport


def plot_serving(report: ServingReport, path: Path) -> None:
    """Plot TTFT and E2EL against the time of sending, and their distributions.

    Args:
        report: what was measured.
        path: the file; its ending is the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes: Any = figure.subplots(2, 2)
    for row, (name, title) in enumerate(
        (("ttft", "time to first token, ms"), ("e2el", "end-to-end latency, ms"))
    ):
        for run in report.runs:
            done = [result for result in run.requests if result.status == OK]
            if done:
                _draw_times(axes[row, 0], done, name, run.target)
                _draw_distribution(axes[row, 1], done, name, run.target)
        axes[row, 0].set_xlabel("sent after, s")
        axes[row, 0].set_ylabel(title)
        axes[row, 1].set_xlabel(title)
        axes[row, 1].set_ylabel("share of answers")
        axes[row, 1].set_ylim(0, 1)
        for place in axes[row]:
            place.grid(alpha=0.3)
            if done:
                place.legend(fontsize="small")
    figure.suptitle(f"{report.workload.workload}, {report.model}, {report.machine.processor}")
    figure.savefig(path, dpi=130)


def _draw_times(axes: Any, results: list[RequestResult], name: str, target: str) -> None:
    kinds = sorted({result.kind for result in results})
    for kind in kinds:
        own = [result for result in results if result.kind == kind]
        axes.plot(
            [result.sent for result in own],
            [1000 * getattr(result, name) for result in own],
            ".",
            markersize=4,
            alpha=0.6,
            label=target if len(kinds) == 1 else f"{target}, {kind}",
        )
    axes.set_yscale("log")
    _label(axes.yaxis)


def _draw_distribution(axes: Any, results: list[RequestResult], name: str, target: str) -> None:
    values = np.sort([1000 * getattr(result, name) for result in results])
    axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=target)
    axes.set_xscale("log")
    _label(axes.xaxis)


def _label(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
