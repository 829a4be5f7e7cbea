"""A comparison of servers: figures by load, the servers, and tables of both."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Group
from rich.table import Table

from midfill.errors import MidfillError
from midfill.system.machine import Machine
from midfill_lab.reporting import ResultTable

MIDFILL = "midfill"
MIDFILL_PLAIN = "midfill without speculation"
LLAMA_CPP = "llama.cpp"
IK_LLAMA_CPP = "ik_llama.cpp"
VLLM = "vllm"
OPENVINO = "openvino"

CPU = "cpu"
"""The device that is no GPU."""
SPECULATING = " speculating"
"""Ends the name of a peer's second run, in which it drafts tokens."""
STORED = "stored"
"""llama.cpp's weights as the model's file has them."""
NATIVE = "native"
"""Prefix and suffix as they are, laid out by the server."""

LOADS = ("prefill", "decode", "keystroke", "rounds", "session")
SPECULATIVE = "decode-speculating"
"""The decode load with one stream, on a server that drafts tokens."""

TOKENS_PER_SECOND = "tokens/s"
"""The only measure of which more is better; all others are times."""


class PeersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        servers: of "midfill", "llama.cpp", "ik_llama.cpp", "openvino" and "vllm".
        llama_formats: weights that llama.cpp and its fork are measured with, each as a server of
            its own:
            ``STORED``, or a type of llama-quantize such as "q4_k_m".
        vllm_dtypes: likewise for vLLM: "float32", "bfloat16", "w8a8".
        loads: of ``LOADS``.
        prefill: prompt lengths, in tokens.
        contexts: tokens before the first decoded one.
        streams: answers decoded at once.
        decoded: tokens of each stream.
        users: documents edited at once in the rounds load.
        rounds: requests per user; at most 7.
        output_tokens: tokens of each answer of rounds and of the editing session.
        keystrokes: requests of the keystroke load; ten characters are typed before each.
        document_tokens: length of the document that they are typed into.
        session: requests of the editing session.
        repeats: runs of prefill and decode.
        round_repeats: runs of rounds.
        turns: how many times each server is started and measured, in turn with the others.
        busy: processes that never wait, beside each server while it is measured.
        threads: per server.
        device: of PyTorch, on which midfill and vLLM compute; llama.cpp and OpenVINO are compared
            on "cpu" alone.
        load_limit: seconds. A load whose prompts alone would take a server longer, at the prefill
            speed just measured in this run of it or in the one before, is skipped; a request
            without an answer for that long ends the server's run.
        start_limit: seconds until a server must answer.
        seed: chooses files and tokens.
    """

    servers: tuple[str, ...] = (MIDFILL, LLAMA_CPP, IK_LLAMA_CPP, OPENVINO, VLLM)
    llama_formats: tuple[str, ...] = ("stored", "q4_0", "q4_k_m")
    vllm_dtypes: tuple[str, ...] = ("float32",)
    loads: tuple[str, ...] = ("prefill", "decode", "keystroke", "rounds", "session")
    prefill: tuple[int, ...] = (512, 2000, 6000)
    contexts: tuple[int, ...] = (16, 2000, 6000)
    streams: tuple[int, ...] = (1, 4, 16)
    decoded: int = 64
    users: tuple[int, ...] = (1, 4)
    rounds: int = 5
    output_tokens: int = 16
    keystrokes: int = 20
    document_tokens: int = 2000
    session: int = 40
    repeats: int = 3
    round_repeats: int = 3
    turns: int = 1
    busy: int = 0
    threads: int = 1
    device: str = CPU
    load_limit: float = 1200.0
    start_limit: float = 600.0
    seed: int = 0


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A load's figure on a server.

    Attributes:
        kind: of load, see ``loads``.
        load: its name, such as "decode at 2,000, 4 streams".
        measure: ``TOKENS_PER_SECOND``, or a time with its unit, such as "TTFT ms".
        layout: of prompts: "fim", "efim", "psm" by the client, "native" by the server; "" where
            there is nothing to lay out.
        median, lowest, highest: over the runs.
        runs: how many.
        values: of each run, in order.
        bound: tokens/s that memory's bandwidth allows; None where other limits matter.
    """

    kind: str
    load: str
    measure: str
    layout: str = ""
    median: float
    lowest: float
    highest: float
    runs: int
    values: tuple[float, ...] = ()
    bound: float | None = None


def figure(
    kind: str,
    load: str,
    measure: str,
    values: Sequence[float],
    *,
    layout: str = "",
    bound: float | None = None,
) -> Figure:
    """Make a figure of the values of some runs."""
    return Figure(
        kind=kind,
        load=load,
        measure=measure,
        layout=layout,
        median=median(values),
        lowest=min(values),
        highest=max(values),
        runs=len(values),
        values=tuple(values),
        bound=bound,
    )


def column(server: str) -> str:
    """Return the column of tables for a server; one run with and without speculation has one."""
    return MIDFILL if server == MIDFILL_PLAIN else server.removesuffix(SPECULATING)


class ServerResult(msgspec.Struct, kw_only=True):
    """A server's run; it is filled in as the run goes on, and kept when that ends early.

    Attributes:
        name: as in ``PeersOptions.servers``, with the format or dtype where a peer is run in
            several; servers that can draft tokens are run twice, see ``column``.
        version: that the server reports.
        precision: of its weights, activations and KV.
        settings: its options beside model, port and name.
        ready_seconds: from its start until it answered /health; None if it never did.
        peak_rss_bytes: peak of the memory resident in all its processes; None if the system has
            no /proc.
        weight_bytes: of weights read per decoding step.
        kv_bytes_per_token: of KV read per decoded token and token of context.
        bytes_per_second: this machine's memory bandwidth, measured just before.
        figures: of the loads that were measured.
        skipped: load -> why it was not measured.
        error: why the run ended early; "" if it didn't.
        more_tokens: how many tokens more than the model's own tokenizer the server counts in a
            small text.
        turns: how many times it was started and measured.
    """

    name: str
    version: str
    precision: str
    settings: str
    bytes_per_second: float
    ready_seconds: float | None = None
    peak_rss_bytes: int | None = None
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    figures: list[Figure] = []
    skipped: dict[str, str] = {}
    error: str = ""
    more_tokens: int = 0
    turns: int = 1

    def find(self, load: str, measure: str, layout: str) -> Figure | None:
        """Return a figure, or None if it was not measured."""
        for figure in self.figures:
            if (figure.load, figure.measure, figure.layout) == (load, measure, layout):
                return figure
        return None


def pooled(earlier: ServerResult, later: ServerResult) -> ServerResult:
    """Return a server's result over another turn, each figure over the runs of all turns.

    The best bandwidth, the shortest start and the largest memory count.
    """
    figures = [
        _pooled_figure(found, later.find(found.load, found.measure, found.layout))
        for found in earlier.figures
    ]
    known = [(found.load, found.measure, found.layout) for found in figures]
    figures += [
        found for found in later.figures if (found.load, found.measure, found.layout) not in known
    ]
    starts = [each.ready_seconds for each in (earlier, later) if each.ready_seconds is not None]
    peaks = [each.peak_rss_bytes for each in (earlier, later) if each.peak_rss_bytes is not None]
    measured = {found.load for found in figures}
    skipped = {**earlier.skipped, **later.skipped}
    return msgspec.structs.replace(
        later,
        bytes_per_second=max(earlier.bytes_per_second, later.bytes_per_second),
        ready_seconds=min(starts, default=None),
        peak_rss_bytes=max(peaks, default=None),
        figures=figures,
        skipped={load: reason for load, reason in skipped.items() if load not in measured},
        turns=earlier.turns + later.turns,
    )


def _pooled_figure(earlier: Figure, later: Figure | None) -> Figure:
    if later is None:
        return earlier
    bounds = [each.bound for each in (earlier, later) if each.bound is not None]
    return figure(
        earlier.kind,
        earlier.load,
        earlier.measure,
        (*earlier.values, *later.values),
        layout=earlier.layout,
        bound=max(bounds, default=None),
    )


class PeersReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        model: its name.
        gpu: the name of the GPU that servers computed on, if any.
        kv_tokens: tokens of KV that each server has room for.
        servers: in the order in which they ran.
        missing: server -> why it is missing, one line.
    """

    model: str
    machine: Machine
    options: PeersOptions
    kv_tokens: int
    servers: list[ServerResult]
    missing: dict[str, str]
    gpu: str = ""

    def own(self, load: str, measure: str, layout: str) -> Figure | None:
        """Return midfill's figure from whichever of its runs measured it."""
        for server in self.servers:
            if column(server.name) == MIDFILL:
                found = server.find(load, measure, layout)
                if found is not None:
                    return found
        return None


def times_faster(
    report: PeersReport, theirs: Figure, *, own_layout: str | None = None
) -> float | None:
    """Return how many times as fast midfill is; below 1 it is slower.

    Args:
        theirs: a server's figure.
        own_layout: of midfill's prompts; None takes the same prompts as theirs.

    Returns:
        None where midfill's figure is missing.
    """
    own = report.own(theirs.load, theirs.measure, own_layout or theirs.layout)
    if own is None or not own.median or not theirs.median:
        return None
    ratio = own.median / theirs.median
    return ratio if theirs.measure == TOKENS_PER_SECOND else 1 / ratio


def read_peers(path: Path) -> PeersReport:
    """Read the figures that ``midfill bench peers --json`` wrote.

    Raises:
        MidfillError: there are none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PeersReport)
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MidfillError(f"{path} is no file of 'midfill bench peers': {error}") from None


_KINDS = ("prefill", "decode", SPECULATIVE, *(kind for kind in LOADS[2:]))
_FIGURES_LEGEND = (
    "Medians (lowest to highest run). fim, psm: PRE prefix SUF suffix MID; efim: PRE head SUF "
    "suffix MID rest, laid out by the client; native: prefix and suffix as they are. Prefill: "
    "random tokens, one token out. Decode: real code, greedy, prompts in the cache before, tokens "
    "of all streams together, without speculation, but for the rows that say so."
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


def peers_drawn(report: PeersReport) -> Group:
    """Return the tables for the terminal, and what was not measured."""
    return Group(*map(_drawn, peers_tables(report)), *peers_notes(report))


def peers_tables(report: PeersReport) -> list[ResultTable]:
    """Return ratios, figures, shares of the bound, and the servers, as far as there are any."""
    tables = [
        _ratios(report),
        _native_ratios(report),
        _figures(report),
        _shares(report),
        _servers(report),
    ]
    return [table for table in tables if table.rows]


def _columns(report: PeersReport) -> dict[str, list[ServerResult]]:
    """Return column -> servers whose figures it shows."""
    columns: dict[str, list[ServerResult]] = {}
    for server in report.servers:
        columns.setdefault(column(server.name), []).append(server)
    return columns


def _peers(report: PeersReport) -> dict[str, list[ServerResult]]:
    return {name: servers for name, servers in _columns(report).items() if name != MIDFILL}


def _rows(report: PeersReport) -> list[Row]:
    """Return (load, layout, measure) of all figures, kinds in the order of loads."""
    found: dict[Row, str] = {}
    for server in report.servers:
        for figure in server.figures:
            found.setdefault((figure.load, figure.layout, figure.measure), figure.kind)
    return sorted(found, key=lambda row: _KINDS.index(found[row]))


def _find(servers: Sequence[ServerResult], row: Row) -> Figure | None:
    load, layout, measure = row
    each = (server.find(load, measure, layout) for server in servers)
    return next((figure for figure in each if figure is not None), None)


def _ratios(report: PeersReport) -> ResultTable:
    """midfill beside the best peer, and each of them, on the same prompts.

    There are no rows without figures of both.
    """
    peers = _peers(report)
    rows = []
    for row in _rows(report):
        ratios = {
            name: None if (theirs := _find(servers, row)) is None else times_faster(report, theirs)
            for name, servers in peers.items()
        }
        found = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        if found:
            best = min(found, key=found.__getitem__)
            cells = {name: _times(ratio) for name, ratio in ratios.items()}
            rows.append({**_labels(row), "best peer": f"{cells[best]}, {best}", **cells})
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
        rows.append({**_labels(row), **{name: _cell(figure) for name, figure in figures.items()}})
    title = f"{report.model}: midfill and its peers"
    return ResultTable(title=title, rows=rows, labels=3, caption=_FIGURES_LEGEND)


def _labels(row: Row) -> dict[str, str]:
    return dict(zip(("load", "prompts", "measured"), row, strict=True))


def _shares(report: PeersReport) -> ResultTable:
    """Decode figures as shares of their bound; no rows if there are none."""
    fastest = max((server.bytes_per_second for server in report.servers), default=0.0)
    rows = []
    for row in _rows(report):
        shares = {name: _share(servers, row, fastest) for name, servers in _columns(report).items()}
        if set(shares.values()) - {"-"}:
            rows.append({"load": row[0], **shares})
    return ResultTable(title="Decode's share of the bytes bound", rows=rows, caption=_SHARE_LEGEND)


def _servers(report: PeersReport) -> ResultTable:
    rows = [
        {
            "server": server.name,
            "version": server.version,
            "precision": server.precision,
            "settings": server.settings,
            "ready s": "-" if server.ready_seconds is None else f"{server.ready_seconds:.1f}",
            "peak memory": _gigabytes(server.peak_rss_bytes),
            "bandwidth": f"{server.bytes_per_second / 1e9:.1f} GB/s",
            "weights read": f"{server.weight_bytes / 1e6:.0f} MB",
            "KV read per token": f"{server.kv_bytes_per_token / 1e3:.1f} KB",
        }
        for server in report.servers
    ]
    return ResultTable(title="Servers", rows=rows, labels=4, caption=_caption(report))


def _caption(report: PeersReport) -> str:
    options = report.options
    read = "read by as many threads"
    place = f"{report.machine}"
    if report.gpu:
        read = "of the GPU's memory, by a copy within it,"
        place = f"{report.gpu}; {place}"
    turns = ""
    if options.turns > 1:
        turns = f"each server was started {options.turns} times, in turn with the others; "
    if options.busy:
        turns += f"beside each, processes that never wait: {options.busy}; "
    return (
        f"{report.model}; {turns}threads: {options.threads}; room for {report.kv_tokens:,} tokens "
        f"of KV each; runs of prefill and decode: {options.turns * options.repeats}, "
        f"of rounds: {options.turns * options.round_repeats}, "
        f"keystrokes: {options.keystrokes}; warmed up with two answers of 16 tokens to 256. "
        "Peak memory: resident in all of a server's processes. "
        f"Bandwidth: {read} just before the server was started. {place}."
    )


def peers_notes(report: PeersReport) -> list[str]:
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


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    spread = (
        f" ({_number(figure.lowest)}\N{EN DASH}{_number(figure.highest)})"
        if figure.runs > 1
        else ""
    )
    return _number(figure.median) + spread


def _number(value: float) -> str:
    """Format a number with three significant digits, or all before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(report: PeersReport, theirs: Figure | None, own_layout: str | None = None) -> str:
    if theirs is None:
        return "-"
    return _times(times_faster(report, theirs, own_layout=own_layout))


def _times(ratio: float | None) -> str:
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
        figure = server.find(load, measure, layout)
        if figure is not None and figure.bound:
            return f"{100 * figure.median / figure.bound * server.bytes_per_second / fastest:.0f}%"
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
