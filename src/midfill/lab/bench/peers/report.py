"""A comparison of servers as tables, for the terminal and as Markdown."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group
from rich.table import Table

from midfill.lab.bench.peers.loads import LOADS, SPECULATIVE
from midfill.lab.bench.peers.results import (
    MIDFILL,
    MIDFILL_PLAIN,
    NATIVE,
    Figure,
    PeersReport,
    ServerResult,
    times_faster,
)
from midfill.system.reporting.result_table import ResultTable

_KINDS = ("prefill", "decode", SPECULATIVE, *(kind for kind in LOADS[2:]))
_FIGURES_LEGEND = (
    "Medians (lowest to highest run). fim, psm: PRE prefix SUF suffix MID; efim: PRE head SUF "
    "suffix MID rest, laid out by the client; native: prefix and suffix as they are. Prefill: "
    "random tokens, one token out. Decode: real code, greedy, prompts in the cache before, tokens "
    "of all streams together; midfill without speculation, but for the rows that say so."
)
_RATIO_LEGEND = (
    "How many times as fast midfill is, both given the same prompts, token by token; below 1.00x "
    "the peer is faster."
)
_NATIVE_LEGEND = (
    "How many times as fast midfill is when the client sends prefix and suffix as they are, beside "
    "each way of laying prompts out on the client: what an unchanged client gains."
)
_SHARE_LEGEND = (
    "Tokens/s as a share of what memory's bandwidth allows when a step reads the weights once and "
    "each stream's KV; the bandwidth is the fastest reading of this run."
)
Row = tuple[str, str, str]


def peers_tables(report: PeersReport) -> Group:
    """Return the tables for the terminal."""
    return Group(*map(_drawn, _tables(report)), *_notes(report))


def peers_markdown(report: PeersReport) -> str:
    """Return the tables for docs/benchmarks.md."""
    parts = [table.markdown() for table in _tables(report)]
    if notes := _notes(report):
        parts.append("\n".join(f"- {note.replace(chr(10), ' / ')}" for note in notes))
    return "\n\n".join(parts)


def _tables(report: PeersReport) -> list[ResultTable]:
    tables = [
        _ratios(report),
        _native_ratios(report),
        _figures(report),
        _shares(report),
        _servers(report),
    ]
    return [table for table in tables if table.rows]


def _columns(report: PeersReport) -> dict[str, list[ServerResult]]:
    """Return column -> servers whose figures it shows; midfill's two runs are one column."""
    columns: dict[str, list[ServerResult]] = {}
    for server in report.servers:
        name = MIDFILL if server.name == MIDFILL_PLAIN else server.name
        columns.setdefault(name, []).append(server)
    return columns


def _peers(report: PeersReport) -> dict[str, list[ServerResult]]:
    return {name: servers for name, servers in _columns(report).items() if name != MIDFILL}


def _rows(report: PeersReport) -> list[Row]:
    """Return (load, layout, measure) of all figures, kinds in the order of loads."""
    found: dict[Row, str] = {}
    for server in report.servers:
        for one in server.figures:
            found.setdefault((one.load, one.layout, one.measure), one.kind)
    return sorted(found, key=lambda row: _KINDS.index(found[row]))


def _find(servers: Sequence[ServerResult], row: Row) -> Figure | None:
    load, layout, measure = row
    each = (server.find(load, measure, layout) for server in servers)
    return next((one for one in each if one is not None), None)


def _ratios(report: PeersReport) -> ResultTable:
    """midfill beside each peer on the same prompts; no rows without figures of both."""
    peers = _peers(report)
    rows = []
    for row in _rows(report):
        ratios = {name: _ratio(report, _find(servers, row)) for name, servers in peers.items()}
        if set(ratios.values()) - {"-"}:
            rows.append({**_labels(row), **ratios})
    title = f"{report.model}: midfill against its peers, same prompts"
    return ResultTable(title=title, rows=rows, labels=3, caption=_RATIO_LEGEND)


def _native_ratios(report: PeersReport) -> ResultTable:
    """midfill's native layout beside every layout of all servers; no rows without it."""
    rows = []
    for row in _rows(report):
        load, layout, measure = row
        if layout in ("", NATIVE) or report.own(load, measure, NATIVE) is None:
            continue
        cells = {
            name: _ratio(report, _find(servers, row), NATIVE)
            for name, servers in _columns(report).items()
        }
        rows.append({**_labels(row), **cells})
    title = f"{report.model}: what native adds"
    return ResultTable(title=title, rows=rows, labels=3, caption=_NATIVE_LEGEND)


def _figures(report: PeersReport) -> ResultTable:
    """A row per load, layout and measure."""
    rows = []
    for row in _rows(report):
        figures = {name: _find(servers, row) for name, servers in _columns(report).items()}
        rows.append({**_labels(row), **{name: _cell(one) for name, one in figures.items()}})
    title = f"{report.model}: midfill and its peers"
    return ResultTable(title=title, rows=rows, labels=3, caption=_FIGURES_LEGEND)


def _labels(row: Row) -> dict[str, str]:
    return dict(zip(("load", "prompts", "measured"), row, strict=True))


def _shares(report: PeersReport) -> ResultTable:
    """Decode figures as shares of their bound; no rows if there are none."""
    fastest = max((one.bytes_per_second for one in report.servers), default=0.0)
    rows = []
    for row in _rows(report):
        shares = {name: _share(servers, row, fastest) for name, servers in _columns(report).items()}
        if set(shares.values()) - {"-"}:
            rows.append({"load": row[0], **shares})
    return ResultTable(title="Decode's share of the bytes bound", rows=rows, caption=_SHARE_LEGEND)


def _servers(report: PeersReport) -> ResultTable:
    rows = [
        {
            "server": one.name,
            "version": one.version,
            "precision": one.precision,
            "settings": one.settings,
            "ready s": "-" if one.ready_seconds is None else f"{one.ready_seconds:.1f}",
            "peak memory": _gigabytes(one.peak_rss_bytes),
            "bandwidth": f"{one.bytes_per_second / 1e9:.1f} GB/s",
            "weights read": f"{one.weight_bytes / 1e6:.0f} MB",
            "KV read per token": f"{one.kv_bytes_per_token / 1e3:.1f} KB",
        }
        for one in report.servers
    ]
    return ResultTable(title="Servers", rows=rows, labels=4, caption=_caption(report))


def _caption(report: PeersReport) -> str:
    options = report.options
    return (
        f"{report.model}; threads: {options.threads}; room for {report.kv_tokens:,} tokens of KV "
        f"each; runs of prefill and decode: {options.repeats}, of rounds: {options.round_repeats}, "
        f"keystrokes: {options.keystrokes}; warmed up with two answers of 16 tokens to 256. "
        "Peak memory: resident in all of a server's processes. "
        "Bandwidth: read by as many threads just before the server was started. "
        f"{report.machine}."
    )


def _notes(report: PeersReport) -> list[str]:
    """Return what was not measured and why, one line each."""
    notes = [f"{name} was left out: {reason}" for name, reason in report.missing.items()]
    for server in report.servers:
        if server.error:
            notes.append(f"{server.name} ended early: {server.error}")
        if server.more_tokens:
            notes.append(
                f"{server.name} tokenizes texts differently: a small one by {server.more_tokens:+d}"
            )
        notes += [f"{server.name}, {load}: {why}" for load, why in server.skipped.items()]
    return notes


def _cell(one: Figure | None) -> str:
    if one is None:
        return "-"
    spread = f" ({_number(one.lowest)}\N{EN DASH}{_number(one.highest)})" if one.runs > 1 else ""
    return _number(one.median) + spread


def _number(value: float) -> str:
    """Format a number with three significant digits, or all before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(report: PeersReport, theirs: Figure | None, own_layout: str | None = None) -> str:
    if theirs is None:
        return "-"
    ratio = times_faster(report, theirs, own_layout=own_layout)
    return "-" if ratio is None else f"{_number(ratio)}x"


def _gigabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f} GB"


def _share(servers: Sequence[ServerResult], row: Row, fastest: float) -> str:
    """Return a figure's share of what a memory bandwidth of ``fastest`` bytes/s allows.

    A figure's bound is of the bandwidth read just before its server. On a shared machine these
    readings differ by half and more, so all figures are held against the fastest of them.
    """
    load, layout, measure = row
    for server in servers:
        one = server.find(load, measure, layout)
        if one is not None and one.bound:
            return f"{100 * one.median / one.bound * server.bytes_per_second / fastest:.0f}%"
    return "-"


def _drawn(table: ResultTable) -> Table:
    """Draw a table; a load's name is shown in the first of its rows alone."""
    head, *_ = table.rows[0]
    before = [{head: ""}, *table.rows]
    rows = [
        {**row, head: ""} if row[head] == above[head] else row
        for above, row in zip(before, table.rows, strict=False)
    ]
    return replace(table, rows=rows).drawn(padding=(0, 0))
