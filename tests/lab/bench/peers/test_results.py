"""Figures of servers, their ratios, and files of them."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from peer_reports import peers_report, server_result
from rich.console import Console

from benchmarks.plots import plot_peers
from benchmarks.report import markdown
from benchmarks.tables import KINDS
from midfill.errors import MidfillError
from midfill_lab.bench.peers.results import (
    TOKENS_PER_SECOND,
    PeersReport,
    figure,
    peers_drawn,
    pooled,
    read_peers,
    times_faster,
)
from midfill_lab.reporting import write_json


def test_medians_with_their_spread() -> None:
    one = figure("rounds", "rounds, 1 user", "wall s", [3.0, 1.0, 7.0], layout="fim")
    assert (one.median, one.lowest, one.highest, one.runs) == (3.0, 1.0, 7.0, 3)


def test_more_tokens_a_second_and_less_time_are_faster() -> None:
    report = peers_report()
    slow, fim, efim = (report.servers[2].figures[i] for i in (0, 1, 2))
    assert times_faster(report, slow) == 4.0
    # The same prompts: midfill was not measured with the peer's other layout.
    assert times_faster(report, fim) == 4.0
    assert times_faster(report, efim) is None
    # Its native figure can be set beside both of the peer's layouts.
    assert times_faster(report, fim, own_layout="native") == 10.0
    assert times_faster(report, efim, own_layout="native") == 2.5
    unknown = figure("prefill", "prefill of 7", "tokens/s", [1.0])
    assert times_faster(report, unknown) is None


def test_a_comparison_can_be_read_again(tmp_path: Path) -> None:
    write_json(tmp_path / "peers.json", peers_report())
    assert read_peers(tmp_path / "peers.json") == peers_report()
    (tmp_path / "peers.json").write_text('{"servers": 3}')
    with pytest.raises(MidfillError, match=r"is no file of 'midfill bench peers'"):
        read_peers(tmp_path / "peers.json")
    with pytest.raises(MidfillError, match=r"none\.json can't be read"):
        read_peers(tmp_path / "none.json")


def tables_of(markdown: str) -> list[list[str]]:
    """Rows of each table, heads first, without the rules."""
    tables = []
    for block in markdown.split("\n\n"):
        if block.startswith("| "):
            heads, _, *rows = block.splitlines()
            tables.append([heads, *rows])
    return tables


def rendered(report: PeersReport) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(peers_drawn(report))
    return console.export_text()


def documented(report: PeersReport) -> str:
    return markdown(KINDS["peers"].tables(report))


@pytest.mark.parametrize("render", [documented, rendered])
def test_figures_spread_ratios_bounds_and_reasons_are_shown(
    render: Callable[[PeersReport], str],
) -> None:
    text = render(peers_report())
    assert "200 (190\N{EN DASH}220)" in text
    assert "4.00x" in text
    assert "80%" in text
    assert "2.00 GB" in text
    assert "llama.cpp, prefill of 512: too slow" in text
    assert "llama.cpp ended early: it died" in text
    assert "vllm was left out: pip install it" in text


def test_same_prompts_come_first_then_what_native_adds_then_the_figures() -> None:
    same, native, figures, *_ = tables_of(documented(peers_report()))
    assert same == [
        "| load | prompts | measured | best peer | llama.cpp |",
        "| decode at 16, 1 stream |  | tokens/s | 4.00x, llama.cpp | 4.00x |",
        "| rounds, 1 user | fim | wall s | 4.00x, llama.cpp | 4.00x |",
    ]
    # Both runs of midfill are one column.
    assert native == [
        "| load | prompts | measured | midfill | llama.cpp |",
        "| rounds, 1 user | fim | wall s | 2.50x | 10.0x |",
        "| rounds, 1 user | efim | wall s | - | 2.50x |",
    ]
    assert figures[0] == "| load | prompts | measured | midfill | llama.cpp |"
    assert "| rounds, 1 user | native | wall s | 4.00 | - |" in figures


def test_the_best_peer_of_each_row_is_the_one_closest_to_midfill() -> None:
    report = peers_report()
    decode, rounds = "decode at 16, 1 stream", "rounds, 1 user"
    other = server_result(
        "ik_llama.cpp",
        [
            figure("decode", decode, "tokens/s", [250.0]),
            figure("rounds", rounds, "wall s", [50.0], layout="fim"),
        ],
    )
    same, *_ = tables_of(
        documented(msgspec.structs.replace(report, servers=[*report.servers, other]))
    )
    assert same == [
        "| load | prompts | measured | best peer | llama.cpp | ik_llama.cpp |",
        "| decode at 16, 1 stream |  | tokens/s | 0.80x, ik_llama.cpp | 4.00x | 0.80x |",
        "| rounds, 1 user | fim | wall s | 4.00x, llama.cpp | 4.00x | 5.00x |",
    ]


def test_a_peer_that_is_run_twice_has_one_column() -> None:
    report, load = peers_report(), "decode at 16, 1 stream, speculating"
    own = server_result("midfill", [figure("decode-speculating", load, "tokens/s", [300.0])])
    drafting = server_result(
        "llama.cpp speculating", [figure("decode-speculating", load, "tokens/s", [100.0])]
    )
    servers = [own, *report.servers[1:], drafting]
    same, figures, *_ = tables_of(documented(msgspec.structs.replace(report, servers=servers)))
    assert same[0] == "| load | prompts | measured | best peer | llama.cpp |"
    assert (
        "| decode at 16, 1 stream, speculating |  | tokens/s | 3.00x, llama.cpp | 3.00x |" in same
    )
    assert f"| {load} |  | tokens/s | 300 | 100 |" in figures


def test_a_report_is_plotted(tmp_path: Path) -> None:
    plot_peers(peers_report(), tmp_path / "peers.png")
    plot_peers(peers_report(), tmp_path / "peers.svg")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    # matplotlib notes each text that it draws as a comment.
    assert "times as fast as the peer" in (tmp_path / "peers.svg").read_text()


def test_shares_are_of_the_fastest_bandwidth_of_the_run() -> None:
    report = peers_report()
    first = report.servers[0]
    faster = msgspec.structs.replace(first, bytes_per_second=2 * first.bytes_per_second)
    shares = [
        next(row for row in tables_of(documented(one))[3] if "decode at 16" in row)
        for one in (report, msgspec.structs.replace(report, servers=[*report.servers, faster]))
    ]
    before, after = ([float(n) for n in re.findall(r"(\d+)%", row)] for row in shares)
    assert before
    assert after == [pytest.approx(share / 2, abs=1) for share in before]


def test_turns_are_pooled_run_by_run() -> None:
    decode, prefill = "decode at 16, 1 stream", "prefill of 512"
    first = server_result(
        "midfill",
        [figure("decode", decode, TOKENS_PER_SECOND, [10.0, 30.0], bound=40.0)],
        bytes_per_second=20e9,
        skipped={prefill: "disturbed", "rounds, 1 user": "too slow"},
    )
    second = server_result(
        "midfill",
        [
            figure("decode", decode, TOKENS_PER_SECOND, [50.0], bound=60.0),
            figure("prefill", prefill, TOKENS_PER_SECOND, [7.0]),
        ],
        bytes_per_second=30e9,
        peak_rss_bytes=3_000_000_000,
        ready_seconds=2.5,
    )
    both = pooled(first, second)
    assert both.turns == 2
    assert both.bytes_per_second == 30e9
    assert both.peak_rss_bytes == 3_000_000_000
    assert both.ready_seconds == 1.5
    assert both.skipped == {"rounds, 1 user": "too slow"}
    pooled_decode, pooled_prefill = both.figures
    assert pooled_decode.values == (10.0, 30.0, 50.0)
    assert (pooled_decode.median, pooled_decode.lowest, pooled_decode.highest) == (30.0, 10.0, 50.0)
    assert pooled_decode.bound == 60.0
    assert pooled_prefill == second.figures[1]
    assert pooled(second, first).find(decode, TOKENS_PER_SECOND, "") is not None
