"""Plots of reports, for the documents: peers, rounds, methods, decodes against length."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from midfill_lab.bench.methods.report import exact_holes, held_share, prediction, recall
from midfill_lab.bench.methods.results import FULL, MethodsReport, ModelResult, Variant
from midfill_lab.bench.peers.loads import decode_name, prefill_name
from midfill_lab.bench.peers.results import (
    MIDFILL,
    NATIVE,
    TOKENS_PER_SECOND,
    Figure,
    PeersReport,
    column,
    times_faster,
)
from midfill_lab.bench.rounds import RoundsReport

if TYPE_CHECKING:
    from benchmarks.decode_length import LengthReport

_LINES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")


def plot_peers(report: PeersReport, path: Path) -> None:
    """Plot a comparison; the file's ending is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ratios = _ratios(report)
    options = report.options
    prefill = {"": {x: prefill_name(x) for x in options.prefill}}
    decode = {
        f"{streams} stream{'s' if streams > 1 else ''}": {
            x: decode_name(x, streams) for x in options.contexts
        }
        for streams in options.streams
    }
    lines = {
        "prefill": (prefill, "prompt tokens", "prefill"),
        "decode": (decode, "tokens of context", "decode, all streams together"),
    }
    measured = {figure.kind for server in report.servers for figure in server.figures}
    left = [kind for kind in lines if kind in measured]
    places: Any  # matplotlib's own type for it can't be named
    if ratios:
        places = [[kind, "ratios"] for kind in left] or [["ratios"]]
        size = (12.0, max(7.0, 0.3 * len({what for what, _, _ in ratios})))
    else:
        places, size = [left or ["prefill"]], (11.0, 4.5)
    figure, axes = pyplot.subplot_mosaic(places, figsize=size, layout="constrained")
    for kind in left:
        _draw_lines(axes[kind], report, *lines[kind])
    if ratios:
        _draw_ratios(axes["ratios"], ratios)
    figure.suptitle(f"{report.model}, {options.threads} threads, {report.machine.processor}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_lines(
    axes: Any,
    report: PeersReport,
    series: Mapping[str, Mapping[int, str]],
    abscissa: str,
    title: str,
) -> None:
    """Draw tokens/s: a colour per server, a line style per series (label -> x -> load)."""
    from matplotlib.ticker import LogLocator

    names = list(dict.fromkeys(column(server.name) for server in report.servers))
    for number, name in enumerate(names):
        for style, loads in enumerate(series.values()):
            points = [(x, _own_or(report, name, load)) for x, load in loads.items()]
            found = [(x, figure) for x, figure in points if figure is not None]
            if found:
                axes.plot(
                    [x for x, _ in found],
                    [figure.median for _, figure in found],
                    _LINES[style % len(_LINES)],
                    marker="o",
                    color=f"C{number}",
                )
    axes.set_title(title)
    axes.set_xlabel(abscissa)
    axes.set_ylabel(TOKENS_PER_SECOND)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        _explain_lines(axes, names, list(series))


def _explain_lines(axes: Any, names: Sequence[str], labels: Sequence[str]) -> None:
    """Add a legend: a colour per server that is drawn, a style per series if there are several."""
    from matplotlib.lines import Line2D

    drawn = {line.get_color() for line in axes.lines}
    handles = [
        Line2D([], [], color=f"C{number}", marker="o", label=name)
        for number, name in enumerate(names)
        if f"C{number}" in drawn
    ]
    if len(labels) > 1:
        handles += [
            Line2D([], [], color="black", linestyle=_LINES[style % len(_LINES)], label=label)
            for style, label in enumerate(labels)
        ]
    axes.legend(handles=handles, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _own_or(report: PeersReport, name: str, load: str) -> Figure | None:
    if name == MIDFILL:
        return report.own(load, TOKENS_PER_SECOND, "")
    for server in report.servers:
        if server.name == name:
            return server.find(load, TOKENS_PER_SECOND, "")
    return None


def _ratios(report: PeersReport) -> list[tuple[str, str, float]]:
    """Return (load, peer, how many times as fast midfill is): same prompts, then native."""
    found = []
    for server in report.servers:
        peer = column(server.name)
        if peer == MIDFILL:
            continue
        for figure in server.figures:
            what = f"{figure.load}, {figure.layout}" if figure.layout else figure.load
            ratio = times_faster(report, figure)
            if ratio is not None:
                found.append((f"{what}: {figure.measure}", peer, ratio))
            ratio = times_faster(report, figure, own_layout=NATIVE) if figure.layout else None
            if ratio is not None:
                found.append((f"{what} beside native: {figure.measure}", peer, ratio))
    return found


def _draw_ratios(axes: Any, ratios: Sequence[tuple[str, str, float]]) -> None:
    """Draw a group of bars per load, the first on top."""
    loads = list(dict.fromkeys(load for load, _, _ in ratios))
    peers = list(dict.fromkeys(peer for _, peer, _ in ratios))
    height = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        bars = [
            (loads.index(load), x) for load, name, x in ratios if name == peer and load in loads
        ]
        axes.barh(
            [-place - number * height for place, _ in bars],
            [x for _, x in bars],
            height=height,
            color=f"C{number + 1}",
            label=f"against {peer}",
        )
    axes.set_yticks([-place for place in range(len(loads))], loads, fontsize=6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.01)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_title("times as fast as the peer")
    axes.legend(fontsize=7, loc="upper right", bbox_to_anchor=(1.0, -0.05), ncols=3)


def plot_rounds(report: RoundsReport, path: Path) -> None:
    """Plot time to first token by round, a line per layout; the file's ending is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, result in report.layouts.items():
        rounds = range(1, len(result.ttft_by_round) + 1)
        axes.plot(rounds, [t * 1000 for t in result.ttft_by_round], marker="o", label=name)
    axes.set_xlabel("round")
    axes.set_ylabel("time to first token, ms (median)")
    axes.set_xticks(range(1, report.options.rounds + 1))
    axes.set_ylim(bottom=0)
    axes.set_title(f"EFIM rounds load, {report.options.users} users, {report.model}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_decode_length(report: "LengthReport", path: Path) -> None:
    """Plot step time against length, a line per method; the file's ending is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, method in enumerate(dict.fromkeys(result.method for result in report.results)):
        found = [result for result in report.results if result.method == method]
        axes.plot(
            [result.tokens for result in found],
            [1000 * result.seconds for result in found],
            marker="osD^vP"[number % 6],
            color="black" if number == 0 else f"C{number - 1}",
            linestyle="--" if number == 0 else "-",
            label=method,
        )
    axes.set_xscale("log")
    axes.set_xticks([result.tokens for result in found])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("milliseconds per token")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{report.model}, {report.threads} thread{'s' * (report.threads > 1)}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


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
            _draw_panel(place, panel, report.variants, result)
        row[0].annotate(
            result.model, (0, 1.12), xycoords="axes fraction", fontsize=11, weight="bold"
        )
    handles, names = axes[0][1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_panel(axes: Any, panel: _Panel, variants: list[Variant], result: ModelResult) -> None:
    """Draw one line per method through its budgets, and full KV's level."""
    from matplotlib.ticker import LogLocator

    for number, method in enumerate(dict.fromkeys(variant.method for variant in variants)):
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
            markerfacecolor="none" if number // 10 % 2 else None,
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
        return None if found is None else found.logprob.value

    return measure


def _divergence(result: ModelResult, specification: str) -> float | None:
    found = prediction(result, specification)
    return None if found is None else found.divergence.value


def _exact(result: ModelResult, specification: str) -> float | None:
    found = exact_holes(result, specification)
    return None if found is None else found.value


_ORDINATE = "mean log-probability of the answer"
_PANELS = (
    _Panel("held-out code: lower is better", "KL from full KV, nats", _divergence, True),
    _Panel("needles, question seen", _ORDINATE, _logprob("needle", "multi-key")),
    _Panel("shared contexts, question not seen", _ORDINATE, _logprob("requests")),
    _Panel("lines filled in exactly", "share", _exact),
)
