"""The rounds load: what is sent, and that only the increment is computed afterwards."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tiny_checkpoints import write_tiny

from benchmarks.plots import plot_rounds
from midfill.errors import MidfillError
from midfill_lab.bench.clients import HttpClient, InProcessClient, Measurement
from midfill_lab.bench.rounds import (
    RoundsOptions,
    RoundsReport,
    layout_fields,
    measure_rounds,
    payload,
    round_texts,
    rounds_table,
    summarise,
)
from midfill_lab.reporting import replace_section

SENTINELS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
OPTIONS = RoundsOptions(users=2, rounds=3, output_tokens=4, repeats=1, sentinels=SENTINELS)
DOCUMENT = "".join(chr(97 + i % 26) for i in range(1400))


def test_prefix_grows_by_a_seventh_of_the_first_half_and_the_suffix_stays() -> None:
    for number in range(1, 8):
        head, prefix, suffix = round_texts(DOCUMENT, number)
        assert len(head) == 100
        assert prefix == DOCUMENT[: 100 * number]
        assert suffix == DOCUMENT[700:]


def test_the_three_ways_to_ask_after_typing() -> None:
    def prompt(layout: str) -> str:
        return layout_fields(layout, "head", "rest", "suffix", ("P", "S", "M"))["prompt"]

    assert prompt("fim") == "PheadrestSsuffixM"
    assert prompt("efim") == "PheadSsuffixMrest"
    native = layout_fields("native", "head", "rest", "suffix", None)
    assert native == {
        "prompt": "headrest",
        "suffix": "suffix",
        "midfill": {"window": "as-sent"},
    }


def test_the_three_ways_of_asking() -> None:
    head, prefix, suffix = round_texts(DOCUMENT, 3)
    fim, efim, native = (
        payload(layout, DOCUMENT, 3, OPTIONS, "m") for layout in ("fim", "efim", "native")
    )
    assert fim["prompt"] == f"<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"
    rest = prefix[len(head) :]
    assert efim["prompt"] == f"<fim_prefix>{head}<fim_suffix>{suffix}<fim_middle>{rest}"
    assert (native["prompt"], native["suffix"]) == (prefix, suffix)
    assert fim["midfill"] == efim["midfill"] == {"layout": "verbatim"}


def test_figures_are_medians_over_users_and_runs() -> None:
    def measured(ttft: float, prompt: int, cached: int) -> Measurement:
        return Measurement(ttft, ttft + 1, prompt, cached, 4, "")

    user = [measured(3, 100, 0), measured(1, 120, 99), measured(2, 150, 110)]
    result = summarise([(10.0, [user, user]), (20.0, [user, user]), (12.0, [user, user])])
    assert result.wall_seconds == 12.0
    assert result.requests_per_second == 6 / 12
    assert result.later_ttft_seconds == 1.5
    assert result.increment == 25
    assert result.later_computed == (21 + 40) / 2
    assert result.most_over_increment == 10


@pytest.fixture(scope="module")
def tiny_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def report(tiny_rounds: Path) -> RoundsReport:
    client = InProcessClient(str(tiny_rounds), None, 2, Console(quiet=True))
    assert client.sentinels == SENTINELS
    try:
        return asyncio.run(measure_rounds(client, OPTIONS))
    finally:
        client.close()


def test_later_rounds_compute_the_increment_and_little_more(report: RoundsReport) -> None:
    for layout in ("efim", "native"):
        assert report.layouts[layout].most_over_increment <= 8
    fim = report.layouts["fim"]
    assert fim.later_computed > 4 * fim.increment
    for result in report.layouts.values():
        assert result.first_computed > 1000  # no run finds another's KV


def test_a_method_changes_nothing_of_what_is_computed(
    tiny_rounds: Path, report: RoundsReport
) -> None:
    method = "snapkv:budget=0.25"
    client = InProcessClient(str(tiny_rounds), None, 2, Console(quiet=True), method)
    try:
        options = msgspec.structs.replace(OPTIONS, layouts=("native",), method=method)
        compressed = asyncio.run(measure_rounds(client, options))
    finally:
        client.close()
    own, full = compressed.layouts["native"], report.layouts["native"]
    # The next keystroke finds the exact prompt, though the answer was written over a part of it.
    assert own.later_computed == pytest.approx(full.later_computed, abs=8)
    assert own.most_over_increment <= 8
    assert method in rounds_table(compressed).markdown()


def test_the_report_is_written_where_people_look(report: RoundsReport, tmp_path: Path) -> None:
    plot_rounds(report, tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "benchmarks.md"
    page.write_text("# Benchmarks\n\nbefore\n\n<!-- rounds -->\nold\n<!-- /rounds -->\n\nafter\n")
    replace_section(page, "rounds", rounds_table(report).markdown())
    text = page.read_text()
    assert "old" not in text
    assert text.index("before") < text.index("| native |") < text.index("after")
    replace_section(tmp_path / "new.md", "rounds", "body")
    assert "<!-- rounds -->\nbody\n<!-- /rounds -->" in (tmp_path / "new.md").read_text()


def test_bad_input_is_one_clear_line() -> None:
    async def nobody() -> None:
        async with HttpClient("http://127.0.0.1:1/v1") as client:
            await client.model()

    with pytest.raises(MidfillError, match=r"no OpenAI-style server at http://127\.0\.0\.1:1/v1"):
        asyncio.run(nobody())
