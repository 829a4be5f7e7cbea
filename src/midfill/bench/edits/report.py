"""The editing sessions' figures as a table for the terminal and as Markdown."""

from rich.table import Table

from midfill.bench.edits.measure import LAYOUTS, WINDOWS, EditsReport, SessionResult

_COLUMNS = (
    "session",
    "requests",
    "characters",
    *(f"{layout} tokens" for layout in LAYOUTS),
    "planner / clairvoyant",
    "planner / efim",
    "planner / psm",
    *(f"{window}: / psm, / whole" for window in WINDOWS),
)


def _cells(result: SessionResult) -> list[str]:
    computed = result.tokens_computed
    planner = computed["planner"]
    cells = [result.name, f"{result.requests:,}", f"{result.characters:,}"]
    cells += [f"{computed[layout]:,}" for layout in LAYOUTS]
    cells += [f"{planner / computed[layout]:.3f}" for layout in ("clairvoyant", "efim", "psm")]
    for window in WINDOWS:
        counts = result.windowed[window]
        share, whole = counts["planner"] / counts["psm"], counts["planner"] / planner
        cells.append(f"{share:.3f}, {whole:.2f}")
    return cells


def _notes(report: EditsReport) -> list[str]:
    planning = report.planning
    return [
        f"Tokens computed; a token is {report.unit}. Seed {report.options.seed}.",
        "At most over what was typed: "
        f"{max(one.most_over_typed for one in report.sessions)} tokens. "
        "At most after accepting a completion: "
        f"{max(one.most_for_accepting for one in report.sessions)} tokens.",
        f"Planning at {planning.characters:,} characters: median {planning.median:.2f} ms, "
        f"p99 {planning.p99:.2f} ms, worst of {planning.requests} {planning.worst:.2f} ms.",
        f"{report.machine}.",
    ]


def edits_table(report: EditsReport) -> Table:
    """For the terminal: short enough for 100 columns."""
    title = "Editing sessions: tokens computed, in thousands, and the planner's share of others'"
    table = Table(title=title, caption="\n".join(_notes(report)), padding=(0, 0))
    heads = ("session", *LAYOUTS)
    ratios = ("/clair", "/efim", "/psm", *(f"{name} /psm" for name in WINDOWS))
    for head in heads + ratios:
        table.add_column(head, justify="left" if head == "session" else "right")
    table.columns[0].no_wrap = True
    for result in report.sessions:
        computed = result.tokens_computed
        planner = computed["planner"]
        shares = [planner / computed[layout] for layout in ("clairvoyant", "efim", "psm")]
        shares += [
            counts["planner"] / counts["psm"]
            for counts in map(result.windowed.get, WINDOWS)
            if counts
        ]
        table.add_row(
            result.name,
            *(f"{computed[layout] / 1000:.1f}" for layout in LAYOUTS),
            *(f"{share:.3f}" for share in shares),
        )
    return table


def edits_markdown(report: EditsReport) -> str:
    """For docs/benchmarks.md."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *(_cells(result) for result in report.sessions)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *_notes(report)])
