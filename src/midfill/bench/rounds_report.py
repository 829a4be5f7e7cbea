"""The rounds load's figures as a table and as a plot."""

from pathlib import Path

from midfill.bench.rounds import LayoutResult, RoundsReport
from midfill.reporting.result_table import ResultTable

_LEGEND = (
    "Speed up: requests/s against fim. Grown by: tokens a later round's prompt is longer than the "
    "one before. Later computed: prompt tokens computed in a later round. Most over: the worst "
    "later round's computed tokens less what its prompt had grown by."
)


def rounds_table(report: RoundsReport) -> ResultTable:
    """A row for each layout."""
    options = report.options
    return ResultTable(
        title="EFIM rounds load",
        rows=[_cells(name, result, report) for name, result in report.layouts.items()],
        caption=f"{report.model}, {options.users} users x {options.rounds} rounds, "
        f"{options.output_tokens} tokens out, median of {options.repeats} runs a layout; "
        f"{report.machine}. {_LEGEND}",
    )


def _cells(name: str, result: LayoutResult, report: RoundsReport) -> dict[str, str]:
    """Heads are short: the table should fit a terminal of 80 columns."""
    base = report.layouts.get("fim")
    speed_up = result.requests_per_second / base.requests_per_second if base else None
    return {
        "layout": name,
        "wall s": f"{result.wall_seconds:.2f}",
        "req/s": f"{result.requests_per_second:.2f}",
        "speed up": "-" if speed_up is None else f"{speed_up:.2f}x",
        "first TTFT ms": f"{result.first_ttft_seconds * 1000:.0f}",
        "later TTFT ms": f"{result.later_ttft_seconds * 1000:.0f}",
        "grown by": f"{result.increment:.0f}",
        "later computed": f"{result.later_computed:.0f}",
        "most over": f"{result.most_over_increment:+d}",
    }


def plot_rounds(report: RoundsReport, path: Path) -> None:
    """Time to first token by round, one line a layout; the file's ending chooses the format."""
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
