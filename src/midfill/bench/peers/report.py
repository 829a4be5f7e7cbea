"""A comparison of servers as tables for the terminal and as Markdown."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from midfill.bench.peers.loads import LOADS, SPECULATIVE
from midfill.bench.peers.results import (
    MIDFILL,
    MIDFILL_PLAIN,
    Figure,
    PeersReport,
    ServerResult,
    times_faster,
)

_KINDS = ("prefill", "decode", SPECULATIVE, *(kind for kind in LOADS[2:]))
_LEGEND = (
    "Medians (lowest to highest run). Times as fast: midfill against that server; where prompts "
    "are laid out, midfill's native figure against each layout of the other's. fim, psm: PRE "
    "prefix SUF suffix MID; efim: PRE head SUF suffix MID rest, laid out by the client; native: "
    "prefix and suffix as they are. Prefill: random tokens, one token out. Decode: real code, "
    "greedy, prompts in the cache before, tokens of all streams together; midfill without "
    "speculation, but for the rows that say so. Typing, rounds and session: midfill as it is."
)
_SHARE_LEGEND = (
    "Tokens/s as a share of what memory allows if a step only read the weights once and each "
    "stream's KV."
)
Row = tuple[str, str, str]


def peers_tables(report: PeersReport) -> Group:
    """For the terminal."""
    parts: list[object] = [
        _table(f"{report.model}: midfill and its peers", _figure_rows(report), _LEGEND, 3)
    ]
    if shares := _share_rows(report):
        parts.append(_table("Decode's share of the bytes bound", shares, _SHARE_LEGEND, 1))
    parts.append(_table("Servers", _server_rows(report), _caption(report), 4))
    parts += _notes(report)
    return Group(*parts)  # type: ignore[arg-type]


def peers_markdown(report: PeersReport) -> str:
    """For docs/benchmarks.md."""
    parts = [_markdown(_figure_rows(report)), _LEGEND]
    if shares := _share_rows(report):
        parts += [_markdown(shares), _SHARE_LEGEND]
    parts += [_markdown(_server_rows(report)), f"{_caption(report)}."]
    if notes := _notes(report):
        parts.append("\n".join(f"- {note.replace(chr(10), ' / ')}" for note in notes))
    return "\n\n".join(parts)


def _columns(report: PeersReport) -> dict[str, list[ServerResult]]:
    """Column's name -> servers whose figures it shows: midfill's two runs are one column."""
    columns: dict[str, list[ServerResult]] = {}
    for server in report.servers:
        name = MIDFILL if server.name == MIDFILL_PLAIN else server.name
        columns.setdefault(name, []).append(server)
    return columns


def _rows(report: PeersReport) -> list[Row]:
    """(load, layout, measure) of all figures: kinds in the order of loads, each as it came."""
    found: dict[Row, str] = {}
    for server in report.servers:
        for one in server.figures:
            found.setdefault((one.load, one.layout, one.measure), one.kind)
    return sorted(found, key=lambda row: _KINDS.index(found[row]))


def _find(servers: Sequence[ServerResult], row: Row) -> Figure | None:
    load, layout, measure = row
    each = (server.find(load, measure, layout) for server in servers)
    return next((one for one in each if one is not None), None)


def _figure_rows(report: PeersReport) -> list[list[str]]:
    """Heads, then a row for every load, layout and measure."""
    columns = _columns(report)
    peers = [name for name in columns if name != MIDFILL] if MIDFILL in columns else []
    rows = [["load", "prompts", "measured", *columns, *(f"times {name}" for name in peers)]]
    for row in _rows(report):
        figures = {name: _find(servers, row) for name, servers in columns.items()}
        cells = [_cell(one) for one in figures.values()]
        rows.append([*row, *cells, *(_ratio(report, figures[name]) for name in peers)])
    return rows


def _share_rows(report: PeersReport) -> list[list[str]]:
    """Heads and rows of decode figures beside their bound; nothing where none was measured."""
    columns = _columns(report)
    rows = []
    for row in _rows(report):
        figures = [_find(servers, row) for servers in columns.values()]
        if any(one is not None and one.bound for one in figures):
            rows.append([row[0], *(_share(one) for one in figures)])
    return [["load", *columns], *rows] if rows else []


def _server_rows(report: PeersReport) -> list[list[str]]:
    heads = ["server", "version", "precision", "settings", "ready s", "peak memory", "bandwidth"]
    rows = [[*heads, "weights read", "KV read a token"]]
    for one in report.servers:
        ready = "-" if one.ready_seconds is None else f"{one.ready_seconds:.1f}"
        peak = "-" if one.peak_rss_bytes is None else f"{one.peak_rss_bytes / 1e9:.2f} GB"
        rows.append(
            [
                one.name,
                one.version,
                one.precision,
                one.settings,
                ready,
                peak,
                f"{one.bytes_per_second / 1e9:.1f} GB/s",
                f"{one.weight_bytes / 1e6:.0f} MB",
                f"{one.kv_bytes_per_token / 1e3:.1f} KB",
            ]
        )
    return rows


def _caption(report: PeersReport) -> str:
    options = report.options
    return (
        f"{report.model}; threads: {options.threads}; room for {report.kv_tokens:,} tokens of KV "
        f"each; runs of prefill and decode: {options.repeats}, of rounds: {options.round_repeats}, "
        f"keystrokes: {options.keystrokes}; warmed up with two answers of 16 tokens to 256. "
        "Peak memory: resident in all of a server's processes. "
        "Bandwidth: read by as many threads just before the server was started. "
        f"{report.machine}"
    )


def _notes(report: PeersReport) -> list[str]:
    """What was not measured, and why; a line each."""
    notes = [f"{name} was left out: {reason}" for name, reason in report.missing.items()]
    for server in report.servers:
        if server.error:
            notes.append(f"{server.name} ended early: {server.error}")
        if server.more_tokens:
            notes.append(
                f"{server.name} reads texts as other tokens: a small one is {server.more_tokens:+d}"
            )
        notes += [f"{server.name}, {load}: {why}" for load, why in server.skipped.items()]
    return notes


def _cell(one: Figure | None) -> str:
    if one is None:
        return "-"
    spread = f" ({_number(one.lowest)}\N{EN DASH}{_number(one.highest)})" if one.runs > 1 else ""
    return _number(one.median) + spread


def _number(value: float) -> str:
    """With three digits or all before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(report: PeersReport, theirs: Figure | None) -> str:
    ratio = None if theirs is None else times_faster(report, theirs)
    return "-" if ratio is None else f"{_number(ratio)}x"


def _share(one: Figure | None) -> str:
    return "-" if one is None or not one.bound else f"{100 * one.median / one.bound:.0f}%"


def _table(title: str, rows: Sequence[Sequence[str]], caption: str, names: int) -> Table:
    """Args: names: how many columns hold words."""
    table = Table(title=title, caption=caption, padding=(0, 0))
    for number, head in enumerate(rows[0]):
        table.add_column(head, justify="left" if number < names else "right")
    before = ""
    for row in rows[1:]:
        table.add_row("" if row[0] == before else row[0], *row[1:])
        before = row[0]
    return table


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    heads, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rest])
