"""A plot of bounds over batch and context, with what was reached."""

from pathlib import Path
from typing import Any

from midfill_lab.bench.ceiling.results import DECODE, PREFILL, CeilingReport, LoadCeiling


def plot_ceiling(report: CeilingReport, path: Path) -> None:
    """Plot tokens/s of decode over the context, of prefill over the prompt, and what takes them.

    Args:
        report: what was measured.
        path: the file; its ending is the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    decode, prefill, parts = figure.subplots(1, 3, width_ratios=(1.2, 0.9, 1.3))
    for number, streams in enumerate(report.options.streams):
        own = [
            ceiling
            for ceiling in report.loads
            if ceiling.phase == DECODE and ceiling.load.streams == streams
        ]
        name = f"{streams} stream{'' if streams == 1 else 's'}"
        _draw_rates(decode, own, [each.load.context for each in own], f"C{number}", name)
    own = [ceiling for ceiling in report.loads if ceiling.phase == PREFILL]
    _draw_rates(prefill, own, [each.load.rows for each in own], "C0", "one prompt")
    for axes, title, abscissa in (
        (decode, "decode, all streams together", "tokens of context"),
        (prefill, "prefill", "tokens of the prompt"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(abscissa)
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    _draw_parts(parts, report.loads)
    figure.suptitle(
        f"{report.model}: lines are bounds, dots what is reached; {report.machine.processor}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_rates(
    axes: Any, ceilings: list[LoadCeiling], places: list[int], color: str, name: str
) -> None:
    rates = [ceiling.tokens / ceiling.bound.seconds for ceiling in ceilings]
    axes.plot(places, rates, "--", marker="_", color=color, label=f"{name}, at most")
    measured = [
        (place, ceiling.tokens, ceiling.seconds)
        for place, ceiling in zip(places, ceilings, strict=True)
        if ceiling.seconds is not None
    ]
    if measured:
        medians = [tokens / spread.median for _, tokens, spread in measured]
        axes.errorbar(
            [place for place, _, _ in measured],
            medians,
            [
                [
                    median - tokens / spread.highest
                    for median, (_, tokens, spread) in zip(medians, measured, strict=True)
                ],
                [
                    tokens / spread.lowest - median
                    for median, (_, tokens, spread) in zip(medians, measured, strict=True)
                ],
            ],
            fmt="o",
            color=color,
            capsize=3,
            label=f"{name}, measured",
        )


def _draw_parts(axes: Any, ceilings: list[LoadCeiling]) -> None:
    """Draw how each bound divides among the parts of a step, the first load on top."""
    names = [part.name for part in ceilings[0].bound.parts]
    places = [-number for number in range(len(ceilings))]
    left = [0.0] * len(ceilings)
    for number, name in enumerate(names):
        shares = []
        for ceiling in ceilings:
            whole = sum(part.seconds for part in ceiling.bound.parts) or 1.0
            shares.append(ceiling.bound.seconds_of(name) / whole)
        axes.barh(places, shares, left=left, color=f"C{number}", label=name, height=0.75)
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    axes.set_yticks(
        places,
        [f"{ceiling.load.name} ({ceiling.bound.resource.value})" for ceiling in ceilings],
        fontsize=6,
    )
    axes.set_xlim(0, 1)
    axes.set_title("share of the bound, and what binds", fontsize=10)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.08), ncols=6)
