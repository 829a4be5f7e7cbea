"""The cache of compiled code: shared by processes, signatures and chips, private to the user."""

import json
import logging
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import pytest

from midfill.kernels.cpu import compiled as compiled_module
from midfill.kernels.cpu.compiled import CompiledCache
from midfill.kernels.cpu.jit import kernel

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, {here!r})
from test_compiled import kept
function = kept(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()  # all start together
dtypes = sys.argv[2].split()
results = [function(np.arange(5).astype(dtype)) for dtype in dtypes]
print(json.dumps([[float(r) for r in results], sum(function.stats.cache_misses.values())]))
"""


def doubled(x):  # type: ignore[no-untyped-def]
    total = x[0] + x[0]
    for i in range(1, len(x)):
        total += x[i] + x[i]
    return total


def kept(folder: Path) -> Any:
    """Return ``doubled``, compiled and cached in ``folder``."""
    compiled: Any = kernel(doubled)
    compiled._cache = CompiledCache(doubled, folder)
    return compiled


def started(folder: Path, dtypes: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(here=str(Path(__file__).parent)), folder, dtypes],
        env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(process: "subprocess.Popen[str]") -> Any:
    """Let a process start, if it has not been let yet, and return what it answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    *_, last = process.stdout
    assert process.wait() == 0
    return json.loads(last)


def test_a_function_is_compiled_once_per_signature(tmp_path: Path) -> None:
    for misses in (1, 0):
        function = kept(tmp_path)
        assert function(np.arange(4.0)) == 12.0
        assert sum(function.stats.cache_misses.values()) == misses
    assert function(np.arange(4)) == 12
    assert sum(function.stats.cache_misses.values()) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_stored_is_machine_code_without_its_ir(tmp_path: Path) -> None:
    assert kept(tmp_path)(np.arange(4.0)) == 12.0
    (file,) = tmp_path.iterdir()
    (_, _, (_, bitcode)), *_ = pickle.loads(file.read_bytes()[compiled_module._DIGEST_BYTES :])
    functions = [
        each
        for each in llvmlite.binding.parse_bitcode(bitcode).functions
        if not each.is_declaration
    ]
    assert any("doubled" in each.name for each in functions)
    for function in functions:
        assert [step.opcode for block in function.blocks for step in block.instructions] == [
            "unreachable"
        ]


@pytest.mark.parametrize("keep", [0, 10, 1000, -1])
def test_truncated_and_damaged_files_are_compiled_again(tmp_path: Path, keep: int) -> None:
    assert kept(tmp_path)(np.arange(4.0)) == 12.0
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:keep] if keep >= 0 else whole[:-9] + bytes(9))
    for misses in (1, 0):
        function = kept(tmp_path)
        assert function(np.arange(4.0)) == 12.0
        assert sum(function.stats.cache_misses.values()) == misses


def test_processes_that_compile_at_once_store_what_is_right_for_each(
    tmp_path: Path,
) -> None:
    """Each process compiles signatures in another order, one of them for another chip."""
    dtypes = ["float32", "float64", "int64", "int32"]
    processes = [
        started(tmp_path, " ".join(dtypes)),
        started(tmp_path, " ".join(reversed(dtypes))),
        started(tmp_path, " ".join(dtypes), NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=""),
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        assert answer(process)[0] == [20.0] * 4
    assert len(list(tmp_path.iterdir())) == 2 * len(dtypes)
    assert answer(started(tmp_path, " ".join(dtypes))) == [[20.0] * 4, 0]


def test_one_process_compiles_what_several_need_at_once(tmp_path: Path) -> None:
    processes = [started(tmp_path, "float32 int64") for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    answers = [answer(process) for process in processes]
    assert [results for results, _ in answers] == [[20.0] * 2] * 3
    assert sum(compiled for _, compiled in answers) == 2


def test_a_folder_that_cannot_be_written_changes_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for misses in (1, 1):
        function = kept(tmp_path / "file" / "kernels")
        assert function(np.arange(4.0)) == 12.0
        assert sum(function.stats.cache_misses.values()) == misses


def test_a_folder_that_cannot_be_looked_into_changes_no_answer(tmp_path: Path) -> None:
    """Another user's, or, as root may look anywhere, one whose name is too long."""
    assert kept(tmp_path / ("x" * 300))(np.arange(4.0)) == 12.0


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_only_the_user_can_read_or_write_the_cache(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "kernels"
    previous = os.umask(umask)
    try:
        kept(folder)(np.arange(4.0))
    finally:
        os.umask(previous)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def refuse_once(folder: Path, log: pytest.LogCaptureFixture) -> None:
    """Check that a start compiles again instead of loading what is in ``folder``, and says so."""
    compiled_module._warn_refused.cache_clear()
    log.clear()
    with log.at_level(logging.WARNING):
        function = kept(folder)
        assert function(np.arange(4.0)) == 12.0
        assert function(np.arange(4)) == 12
    assert sum(function.stats.cache_misses.values()) == 2
    (line,) = log.messages
    assert str(folder) in line
    assert "set MIDFILL_CACHE" in line


def compile_two(folder: Path) -> None:
    function = kept(folder)
    function(np.arange(4.0))
    function(np.arange(4))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_files_that_others_can_write_are_refused_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    compile_two(tmp_path)
    for file in tmp_path.iterdir():
        file.chmod(mode)
    refuse_once(tmp_path, caplog)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    function = kept(tmp_path)
    function(np.arange(4.0))
    assert sum(function.stats.cache_misses.values()) == 0


def test_files_of_another_user_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_two(tmp_path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    refuse_once(tmp_path, caplog)
