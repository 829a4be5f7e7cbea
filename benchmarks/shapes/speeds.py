"""How fast models of other shapes are beside other servers, one line each: for docs/models.md."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import markdown
from midfill.errors import OptionError
from midfill_lab.bench.peers.results import (
    MIDFILL,
    TOKENS_PER_SECOND,
    Figure,
    PeersReport,
    ServerResult,
    column,
    read_peers,
)
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable, replace_section

_SECTION = "shape-speeds"
_PREFIX = "random-"

FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="What 'midfill bench peers --json' wrote, a file for each model.",
        dir_okay=False,
    ),
]


def shape_speeds(files: FilesArgument, docs: DocsOption = None) -> None:
    """Print what 'midfill bench peers' has measured of several models as one table, or write it
    into a page."""
    text = markdown([speeds_table([read_peers(file) for file in files])])
    if docs is None:
        typer.echo(text)
    else:
        replace_section(docs, _SECTION, text)


def speeds_table(reports: list[PeersReport]) -> ResultTable:
    """Return a line for each model: decode of one stream, and prefill, by server.

    Raises:
        OptionError: a report lacks midfill's figures.
    """
    peers: dict[str, None] = {}
    for report in reports:
        peers |= dict.fromkeys(column(server.name) for server in report.servers)
    peers.pop(MIDFILL, None)
    rows = [_row(report, list(peers)) for report in reports]
    options = reports[0].options
    counts = [report.options.turns for report in reports]
    turns = " to ".join(map(str, sorted({min(counts), max(counts)})))
    caption = (
        "Read per token: weights that a decoded token needs, of the file that is served. Share: "
        "decoded tokens/s times these bytes, beside what as many threads read of memory per second"
        " at most in the same run. Decode: tokens/s of one stream after a short prompt. Prompts:"
        f" tokens/s, of {options.prefill[0]:,} random ones. In brackets, how many times as fast"
        f" midfill is. Peak memory: of midfill. Medians of {options.repeats} runs per start; each"
        f" server was started {turns} times, in turn with the others. {reports[0].machine}."
    )
    return ResultTable(rows=rows, caption=caption)


def _row(report: PeersReport, peers: list[str]) -> dict[str, str]:
    own = [server for server in report.servers if column(server.name) == MIDFILL]
    decode, prefill = _figure(own, "decode"), _figure(own, "prefill")
    if decode is None or prefill is None:
        reasons = [server.error for server in own if server.error]
        raise OptionError(
            f"{report.model}: midfill's decode and prefill are missing: "
            + ("; ".join(reasons) or "measure both with --loads prefill,decode")
        )
    weights = own[0].weight_bytes
    fastest = max(server.bytes_per_second for server in report.servers)
    peak = max(server.peak_rss_bytes or 0 for server in own)
    row = {
        "shape": report.model.removeprefix(_PREFIX),
        "read per token": f"{weights / 1e6:,.0f} MB",
        "peak memory": f"{peak / 1e9:.1f} GB" if peak else "-",
        "decode": _value(decode),
        "share": f"{decode.median * weights / fastest:.0%}",
    }
    row |= {f"{peer}, decode": _beside(report, peer, decode) for peer in peers}
    row["prompts"] = _value(prefill)
    return row | {f"{peer}, prompts": _beside(report, peer, prefill) for peer in peers}


def _figure(servers: list[ServerResult], kind: str) -> Figure | None:
    """Return the first figure of a load: that of one stream, or of the shortest prompt."""
    for server in servers:
        for figure in server.figures:
            if (figure.kind, figure.measure) == (kind, TOKENS_PER_SECOND):
                return figure
    return None


def _beside(report: PeersReport, peer: str, own: Figure) -> str:
    for server in report.servers:
        if column(server.name) == peer:
            theirs = server.find(own.load, own.measure, own.layout)
            if theirs is not None:
                return f"{_value(theirs)} ({own.median / theirs.median:.2f}x)"
    return "-"


def _value(figure: Figure) -> str:
    return f"{figure.median:,.0f}" if figure.median >= 100 else f"{figure.median:.1f}"
