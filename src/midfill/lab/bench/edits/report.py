"""The tables of the editing sessions, for the terminal and for the docs."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from midfill.lab.bench.edits.measure import (
    LAYOUTS,
    SHOWN,
    WHOLE,
    WINDOWS,
    EditsReport,
    SessionResult,
)
from midfill.system.reporting.result_table import ResultTable


def edits_table(report: EditsReport) -> Table:
    """Return the table for the terminal, narrow enough for 100 columns."""
    table = ResultTable(
        title="Editing sessions: tokens computed, in thousands, and the planner's share of others'",
        rows=[_short_cells(result) for result in report.sessions],
        caption=_notes(report),
    ).drawn(padding=(0, 0))
    table.columns[0].no_wrap = True
    return table


def edits_markdown(report: EditsReport) -> str:
    """Return the table for docs/benchmarks.md."""
    rows = [_cells(result) for result in report.sessions]
    return ResultTable(rows=rows, caption=_notes(report)).markdown()


def _cells(result: SessionResult) -> dict[str, str]:
    computed = result.tokens_computed
    planner = computed["planner"]
    cells = {
        "session": _label(result),
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
    for window, tokens in result.shown.items():
        cells[f"shown {window}: / whole"] = f"{tokens / planner:.2f}"
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
        f"{_histories(report)}"
        f"Tokens computed; a token is {report.unit}. Seed {report.options.seed}.\n"
        "At most over what was typed: "
        f"{max(one.most_over_typed for one in report.sessions)} tokens. "
        "At most after accepting a completion: "
        f"{max(one.most_for_accepting for one in report.sessions)} tokens.\n"
        f"{_moves(report.sessions)}"
        f"Planning at {planning.characters:,} characters: median {planning.median:.2f} ms, "
        f"p99 {planning.p99:.2f} ms, worst of {planning.requests} {planning.worst:.2f} ms.\n"
        f"{report.machine}."
    )


def _label(result: SessionResult) -> str:
    return f"{result.name}@{result.commit[:7]}" if result.commit else result.name


def _histories(report: EditsReport) -> str:
    """The planner's range over histories, as a line of the notes."""
    ranges = report.over_histories
    if not ranges:
        return ""
    shares = ", ".join(
        f"{ranges[layout].low:.3f} to {ranges[layout].high:.3f} of {layout}"
        for layout in ("clairvoyant", "efim", "psm")
    )
    pinned = [_label(one).removeprefix("git: ") for one in report.sessions if one.commit]
    return (
        f"The planner's tokens over {len(pinned)} histories ({', '.join(pinned)}), lowest to "
        f"highest: {shares}.\n"
    )


def _moves(sessions: Sequence[SessionResult]) -> str:
    """What moves of the caret compute over all sessions, as a line of the notes."""
    found = []
    for window in (WHOLE, *SHOWN):
        costs = [cost for one in sessions for cost in one.moves[window]]
        if costs:
            what = "the whole document" if window == WHOLE else window
            found.append(f"{median(costs):.0f} and {max(costs):,} with {what}")
    return f"A caret that moves, median and most tokens: {'; '.join(found)}.\n" if found else ""
