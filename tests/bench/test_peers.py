"""midfill bench peers: a real server through every load, and what is made of the figures."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tiny_checkpoints import write_tiny

from midfill.bench.clients import Measurement
from midfill.bench.peers.compare import SERVERS, Programs, compare_peers, parse_names
from midfill.bench.peers.compared_model import ComparedModel, Prompts, open_compared
from midfill.bench.peers.loads import (
    ALL_LAYOUTS,
    LAID_OUT,
    keystroke_fields,
    loads_for,
    rate_together,
)
from midfill.bench.peers.plot import plot_peers
from midfill.bench.peers.report import peers_markdown, peers_tables
from midfill.bench.peers.results import (
    Figure,
    PeersOptions,
    PeersReport,
    ServerResult,
    figure,
    read_peers,
    times_faster,
)
from midfill.bench.peers.run import reason_to_skip
from midfill.errors import MidfillError
from midfill.reporting.publish import write_json
from midfill.system.machine import describe_machine

OPTIONS = PeersOptions(
    servers=("midfill",),
    prefill=(200, 9000),
    contexts=(16, 300),
    streams=(1, 3),
    decoded=300,
    users=(1,),
    rounds=2,
    output_tokens=4,
    keystrokes=3,
    document_tokens=400,
    session=3,
    repeats=2,
    round_repeats=1,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ComparedModel:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    return open_compared(str(write_tiny("llama", folder, max_position_embeddings=8192)), None)


@pytest.fixture(scope="module")
def saved() -> list[PeersReport]:
    return []


@pytest.fixture(scope="module")
def report(model: ComparedModel, saved: list[PeersReport]) -> PeersReport:
    """What midfill's own server does on a tiny model."""

    def save(report: PeersReport) -> None:
        saved.append(msgspec.json.decode(msgspec.json.encode(report), type=PeersReport))

    return compare_peers(model, OPTIONS, Programs(), save=save)


def names(report: PeersReport) -> set[tuple[str, str, str]]:
    return {
        (one.load, one.layout, one.measure) for server in report.servers for one in server.figures
    }


class TestOwnServer:
    def test_every_load_is_measured(self, report: PeersReport) -> None:
        assert [one.name for one in report.servers] == ["midfill", "midfill without speculation"]
        assert not any(server.error for server in report.servers)
        found = names(report)
        assert ("prefill of 200", "", "tokens/s") in found
        assert ("decode at 16, 1 stream", "", "tokens/s") in found
        assert ("decode at 300, 3 streams", "", "tokens/s") in found
        assert ("decode at 300, 1 stream, speculating", "", "tokens/s") in found
        for layout in ("fim", "efim", "native"):
            assert ("10 characters typed into 400 tokens", layout, "TTFT ms") in found
            assert ("10 characters typed into 400 tokens", layout, "8 more ms") in found
            assert ("rounds, 1 user", layout, "wall s") in found
        for layout in ("psm", "native"):
            assert ("editing session of 3", layout, "TTFT ms") in found
        for server in report.servers:
            for one in server.figures:
                assert 0 < one.lowest <= one.median <= one.highest, one

    def test_decode_runs_without_speculation_and_beside_its_bound(
        self, report: PeersReport
    ) -> None:
        guessing, plain = report.servers
        assert "--no-speculation" in plain.settings
        assert {one.kind for one in plain.figures} == {"decode"}
        assert "decode" not in {one.kind for one in guessing.figures}
        bounds = {one.load: one.bound or 0 for one in plain.figures}
        alone = bounds["decode at 300, 1 stream"]
        # Weights are read once for all streams, each stream's KV for itself.
        assert alone < bounds["decode at 300, 3 streams"] < 3 * alone
        step = plain.weight_bytes + 450 * plain.kv_bytes_per_token
        assert alone == pytest.approx(plain.bytes_per_second / step)

    def test_what_is_too_long_for_the_model_is_left_out_with_the_reason(
        self, report: PeersReport
    ) -> None:
        assert "prefill of 9,000" not in {load for load, _, _ in names(report)}
        reason = report.servers[0].skipped["prefill of 9,000"]
        assert reason == "takes 9,001 tokens, the model has 8,192"

    def test_servers_are_described(self, report: PeersReport) -> None:
        for server in report.servers:
            assert server.ready_seconds is not None
            assert server.ready_seconds > 0
            assert server.peak_rss_bytes is None or server.peak_rss_bytes > 100e6
            assert server.bytes_per_second > 1e8
            assert server.weight_bytes > 100_000
            assert server.kv_bytes_per_token == 4 * 2 * 3 * 2 * 32
            assert "float32" in server.precision
            assert server.more_tokens == 0

    def test_figures_are_saved_after_each_server(
        self, report: PeersReport, saved: list[PeersReport]
    ) -> None:
        assert [len(each.servers) for each in saved] == [1, 2]
        assert saved[-1] == report

    def test_servers_measured_before_are_kept(
        self, model: ComparedModel, report: PeersReport, saved: list[PeersReport]
    ) -> None:
        later = compare_peers(model, OPTIONS, Programs(), earlier=report)
        assert later.servers == report.servers
        # One that broke off is run again; here it is missing.
        broken = msgspec.structs.replace(server("llama.cpp", []), error="it died")
        earlier = msgspec.structs.replace(report, servers=[*report.servers, broken])
        options = msgspec.structs.replace(
            OPTIONS, servers=("midfill", "llama.cpp"), llama_formats=("stored",)
        )
        resumed = compare_peers(model, options, Programs(), earlier=earlier)
        assert resumed.servers == report.servers
        assert list(resumed.missing) == ["llama.cpp"]

    def test_figures_of_other_loads_are_not_continued(
        self, model: ComparedModel, report: PeersReport
    ) -> None:
        options = msgspec.structs.replace(OPTIONS, decoded=7)
        with pytest.raises(MidfillError, match="can't be resumed with these options"):
            compare_peers(model, options, Programs(), earlier=report)


class TestPrompts:
    def test_the_three_ways_to_ask_after_typing(self) -> None:
        def prompt(layout: str) -> str:
            return keystroke_fields(layout, "head", "rest", "suffix", ("P", "S", "M"))["prompt"]

        assert prompt("fim") == "PheadrestSsuffixM"
        assert prompt("efim") == "PheadSsuffixMrest"
        native = keystroke_fields("native", "head", "rest", "suffix", None)
        assert native == {"prompt": "headrest", "suffix": "suffix"}

    def test_streams_read_different_code_and_longer_contexts_begin_with_shorter_ones(
        self, model: ComparedModel
    ) -> None:
        prompts = Prompts(model, seed=0)
        first, second = (prompts.code_tokens(stream, 300, 500) for stream in (0, 1))
        assert len(first) == len(second) == 300
        assert first != second
        assert prompts.code_tokens(0, 400, 500)[:300] == first
        assert Prompts(model, seed=0).code_tokens(0, 300, 500) == first

    def test_random_tokens_are_ordinary_ones_and_never_the_same(self, model: ComparedModel) -> None:
        prompts = Prompts(model, seed=0)
        special = set(model.checkpoint.tokenizer.special_tokens.values())
        tokens = prompts.random_tokens(2000)
        assert not special & set(tokens)
        assert prompts.random_tokens(2000) != tokens

    def test_a_document_has_the_wanted_length_around_what_is_typed(
        self, model: ComparedModel
    ) -> None:
        prefix, typed, suffix = Prompts(model, seed=0).document(400, 30)
        tokenizer = model.checkpoint.tokenizer
        assert len(typed) == 30
        assert abs(len(tokenizer.encode(prefix)) - 200) <= 2
        assert abs(len(tokenizer.encode(suffix)) - 200) <= 2

    def test_only_the_loads_that_are_asked_for(self, model: ComparedModel) -> None:
        fewer = msgspec.structs.replace(OPTIONS, loads=("rounds", "prefill"))
        loads = loads_for(fewer, Prompts(model, seed=0), ALL_LAYOUTS)
        assert [load.kind for load in loads] == ["prefill", "prefill", "rounds"]

    def test_a_peer_is_not_sent_prefix_and_suffix(self, model: ComparedModel) -> None:
        prompts = Prompts(model, seed=0)
        some = msgspec.structs.replace(OPTIONS, loads=("prefill", "keystroke", "rounds"))
        peer = loads_for(some, prompts, LAID_OUT)
        own = loads_for(some, prompts, ALL_LAYOUTS)
        for theirs, ours in zip(peer, own, strict=True):
            assert (theirs.prompt_tokens < ours.prompt_tokens) == (ours.kind != "prefill")


def answer(arrivals: Sequence[float], tokens: int) -> Measurement:
    return Measurement(0.1, 1.0, 16, 0, tokens, "", tuple(arrivals))


class TestArithmetic:
    def test_streams_count_while_all_of_them_are_written(self) -> None:
        early = answer([0.0, 1.0, 2.0, 3.0, 4.0], 5)
        late = answer([1.0, 2.0, 3.0, 4.0, 5.0], 5)
        assert rate_together([early]) == 1.0
        assert rate_together([early, late]) == 2.0  # from 1 to 4: three tokens each
        assert rate_together([answer([0.0, 1.0, 2.0], 9)]) == 4.0  # four tokens a message
        with pytest.raises(MidfillError, match="not decoded at the same time"):
            rate_together([early, answer([9.0, 10.0, 11.0], 3)])

    def test_medians_with_their_spread(self) -> None:
        one = figure("rounds", "rounds, 1 user", "wall s", [3.0, 1.0, 7.0], layout="fim")
        assert (one.median, one.lowest, one.highest, one.runs) == (3.0, 1.0, 7.0, 3)

    def test_more_tokens_a_second_and_less_time_are_faster(self) -> None:
        report = compared()
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

    def test_loads_that_would_take_too_long_are_left_out(self, model: ComparedModel) -> None:
        some = msgspec.structs.replace(OPTIONS, loads=("prefill", "decode"))
        loads = {load.name: load for load in loads_for(some, Prompts(model, 0), LAID_OUT)}
        decode, long = loads["decode at 300, 3 streams"], loads["prefill of 9,000"]
        slow = [figure("prefill", "prefill of 200", "tokens/s", [9.0])]
        assert reason_to_skip(decode, 8192, slow, limit=100) is None
        reason = reason_to_skip(decode, 8192, slow, limit=99)
        assert reason == "its prompts would take about 100 s, more than the limit of 99 s"
        assert reason_to_skip(decode, 8192, [], limit=1) is None  # nothing to go by
        assert reason_to_skip(long, 9001, slow, limit=1) is None  # measures what others go by

    def test_names_on_the_command_line(self) -> None:
        assert parse_names("vllm, midfill", SERVERS, "--only") == ("midfill", "vllm")
        with pytest.raises(MidfillError, match="--only names ollama; there are midfill"):
            parse_names("midfill,ollama", SERVERS, "--only")


def server(name: str, figures: list[Figure], **more: object) -> ServerResult:
    fields: dict[str, object] = {
        "version": "1",
        "precision": "float32",
        "settings": "-t 2",
        "ready_seconds": 1.5,
        "peak_rss_bytes": 2_000_000_000,
        "weight_bytes": 100_000_000,
        "kv_bytes_per_token": 23_040,
        "bytes_per_second": 20e9,
        "skipped": {},
    }
    return msgspec.convert(
        {**fields, **more, "name": name, "figures": msgspec.to_builtins(figures)}, ServerResult
    )


def compared() -> PeersReport:
    """A comparison whose figures are easy to work out; no server was run for it."""
    decode, rounds = "decode at 16, 1 stream", "rounds, 1 user"
    own = [
        figure("rounds", rounds, "wall s", [10.0], layout="fim"),
        figure("rounds", rounds, "wall s", [4.0], layout="native"),
    ]
    plain = [figure("decode", decode, "tokens/s", [200.0, 190.0, 220.0], bound=250.0)]
    theirs = [
        figure("decode", decode, "tokens/s", [50.0], bound=200.0),
        figure("rounds", rounds, "wall s", [40.0], layout="fim"),
        figure("rounds", rounds, "wall s", [10.0], layout="efim"),
    ]
    return PeersReport(
        model="m",
        machine=describe_machine(),
        options=PeersOptions(contexts=(16,), streams=(1,)),
        kv_tokens=4096,
        servers=[
            server("midfill", own),
            server("midfill without speculation", plain),
            server("llama.cpp", theirs, skipped={"prefill of 512": "too slow"}, error="it died"),
        ],
        missing={"vllm": "pip install it"},
    )


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
    console.print(peers_tables(report))
    return console.export_text()


class TestReport:
    @pytest.mark.parametrize("render", [peers_markdown, rendered])
    def test_figures_spread_ratios_bounds_and_reasons_are_shown(
        self, render: Callable[[PeersReport], str]
    ) -> None:
        text = render(compared())
        assert "200 (190\N{EN DASH}220)" in text
        assert "4.00x" in text
        assert "80%" in text
        assert "2.00 GB" in text
        assert "llama.cpp, prefill of 512: too slow" in text
        assert "llama.cpp ended early: it died" in text
        assert "vllm was left out: pip install it" in text

    def test_same_prompts_come_first_then_what_native_adds_then_the_figures(self) -> None:
        same, native, figures, *_ = tables_of(peers_markdown(compared()))
        assert same == [
            "| load | prompts | measured | llama.cpp |",
            "| decode at 16, 1 stream |  | tokens/s | 4.00x |",
            "| rounds, 1 user | fim | wall s | 4.00x |",
        ]
        # Both runs of midfill are one column.
        assert native == [
            "| load | prompts | measured | midfill | llama.cpp |",
            "| rounds, 1 user | fim | wall s | 2.50x | 10.0x |",
            "| rounds, 1 user | efim | wall s | - | 2.50x |",
        ]
        assert figures[0] == "| load | prompts | measured | midfill | llama.cpp |"
        assert "| rounds, 1 user | native | wall s | 4.00 | - |" in figures

    def test_a_comparison_can_be_read_again(self, report: PeersReport, tmp_path: Path) -> None:
        write_json(tmp_path / "peers.json", report)
        assert read_peers(tmp_path / "peers.json") == report
        (tmp_path / "peers.json").write_text('{"servers": 3}')
        with pytest.raises(MidfillError, match=r"is no file of 'midfill bench peers'"):
            read_peers(tmp_path / "peers.json")
        with pytest.raises(MidfillError, match=r"none\.json can't be read"):
            read_peers(tmp_path / "none.json")

    def test_a_real_report_is_drawn(self, report: PeersReport, tmp_path: Path) -> None:
        plot_peers(report, tmp_path / "own.png")
        plot_peers(compared(), tmp_path / "peers.svg")
        assert (tmp_path / "own.png").read_bytes().startswith(b"\x89PNG")
        # matplotlib notes each text that it draws as a comment.
        assert "times as fast as the peer" in (tmp_path / "peers.svg").read_text()
        assert "| prefill of 200 |" in peers_markdown(report)
