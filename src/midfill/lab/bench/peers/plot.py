"""A comparison of servers as a plot: prefill by length, decode by context, times as fast."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midfill.lab.bench.peers.loads import decode_name, prefill_name
from midfill.lab.bench.peers.results import (
    MIDFILL,
    MIDFILL_PLAIN,
    NATIVE,
    TOKENS_PER_SECOND,
    Figure,
    PeersReport,
    times_faster,
)

_LINES = ("-", "--", ":", "-.")


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
    measured = {one.kind for server in report.servers for one in server.figures}
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

    names = list(
        dict.fromkeys(
            MIDFILL if server.name == MIDFILL_PLAIN else server.name for server in report.servers
        )
    )
    for number, name in enumerate(names):
        for style, (label, loads) in enumerate(series.items()):
            points = [(x, _own_or(report, name, load)) for x, load in loads.items()]
            found = [(x, one) for x, one in points if one is not None]
            if found:
                axes.plot(
                    [x for x, _ in found],
                    [one.median for _, one in found],
                    _LINES[style % len(_LINES)],
                    marker="o",
                    color=f"C{number}",
                    label=", ".join(part for part in (name, label) if part),
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
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


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
        if server.name in (MIDFILL, MIDFILL_PLAIN):
            continue
        for one in server.figures:
            what = f"{one.load}, {one.layout}" if one.layout else one.load
            ratio = times_faster(report, one)
            if ratio is not None:
                found.append((f"{what}: {one.measure}", server.name, ratio))
            ratio = times_faster(report, one, own_layout=NATIVE) if one.layout else None
            if ratio is not None:
                found.append((f"{what} beside native: {one.measure}", server.name, ratio))
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
