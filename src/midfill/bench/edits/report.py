"""The editing sessions' figures as a table for the terminal and as Markdown."""

from rich.table import Table

from midfill.bench.edits.measure import LAYOUTS, WINDOWS, EditsReport, SessionResult
from midfill.reporting.result_table import ResultTable


def edits_table(report: EditsReport) -> Table:
    """For the terminal: short enough for 100 columns."""
    table = ResultTable(
        title="Editing sessions: tokens computed, in thousands, and the planner's share of others'",
        rows=[_short_cells(result) for result in report.sessions],
        caption=_notes(report),
    ).drawn(padding=(0, 0))
    table.columns[0].no_wrap = True
    return table


def edits_markdown(report: EditsReport) -> str:
    """For docs/benchmarks.md."""
    rows = [_cells(result) for result in report.sessions]
    return ResultTable(rows=rows, caption=_notes(report)).markdown()


def _cells(result: SessionResult) -> dict[str, str]:
    computed = result.tokens_computed
    planner = computed["planner"]
    cells = {
        "session": result.name,
        "requests": f"{result.requests:,}",
        "characters": f"{result.characters:,}",
    }
    cells |= {f"{layout} tokens": f"{computed[layout]:,}" for layout in LAYOUTS}
    for layout in ("clairvoyant", "efim", "psm"):
        cells[f"planner / {layout}"] = f"{planner / computed[layout]:.3f}"
    for window in WINDOWS:
        counts = result.windowed[window]
        share, whole = counts["planner"] / counts["psm"], counts["planner"] / planner
        cells[f"{window}: / psm, / whole"] = f"{share:.3f}, {whole:.2f}"
    return cells


def _short_cells(result: SessionResult) -> dict[str, str]:
    computed = result.tokens_computed
    cells = {"session": result.name}
    cells |= {layout: f"{computed[layout] / 1000:.1f}" for layout in LAYOUTS}
    for head, layout in (("/clair", "clairvoyant"), ("/efim", "efim"), ("/psm", "psm")):
        cells[head] = f"{computed['planner'] / computed[layout]:.3f}"
    for window in WINDOWS:
        counts = result.windowed[window]
        cells[f"{window} /psm"] = f"{counts['planner'] / counts['psm']:.3f}"
    return cells


def _notes(report: EditsReport) -> str:
    planning = report.planning
    return (
        f"Tokens computed; a token is {report.unit}. Seed {report.options.seed}.\n"
        "At most over what was typed: "
        f"{max(one.most_over_typed for one in report.sessions)} tokens. "
        "At most after accepting a completion: "
        f"{max(one.most_for_accepting for one in report.sessions)} tokens.\n"
        f"Planning at {planning.characters:,} characters: median {planning.median:.2f} ms, "
        f"p99 {planning.p99:.2f} ms, worst of {planning.requests} {planning.worst:.2f} ms.\n"
        f"{report.machine}."
    )
