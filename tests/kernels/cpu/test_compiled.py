"""Compiled code on disk: shared by processes, signatures and chips, and never trusted blindly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midfill.kernels.cpu.compiled import CompiledCache
from midfill.kernels.cpu.jit import kernel

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, {here!r})
from test_compiled import kept
function = kept(Path(sys.argv[1]))
sys.stdin.readline()  # all start together
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
    """``doubled``, compiled and kept in ``folder``."""
    compiled: Any = kernel(doubled)
    compiled._cache = CompiledCache(doubled, folder)
    return compiled


def started(folder: Path, dtypes: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(here=str(Path(__file__).parent)), folder, dtypes],
        env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(process: "subprocess.Popen[str]") -> Any:
    out, _ = process.communicate("\n")
    assert process.returncode == 0
    return json.loads(out)


def test_is_compiled_once_for_a_signature(tmp_path: Path) -> None:
    for misses in (1, 0):
        function = kept(tmp_path)
        assert function(np.arange(4.0)) == 12.0
        assert sum(function.stats.cache_misses.values()) == misses
    assert function(np.arange(4)) == 12
    assert sum(function.stats.cache_misses.values()) == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("keep", [0, 10, 1000, -1])
def test_what_was_cut_short_or_damaged_is_compiled_again(tmp_path: Path, keep: int) -> None:
    assert kept(tmp_path)(np.arange(4.0)) == 12.0
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:keep] if keep >= 0 else whole[:-9] + bytes(9))
    for misses in (1, 0):
        function = kept(tmp_path)
        assert function(np.arange(4.0)) == 12.0
        assert sum(function.stats.cache_misses.values()) == misses


def test_processes_that_compile_at_once_keep_what_is_right_for_each(tmp_path: Path) -> None:
    """Signatures in another order each, and one for another chip."""
    dtypes = ["float32", "float64", "int64", "int32"]
    processes = [
        started(tmp_path, " ".join(dtypes)),
        started(tmp_path, " ".join(reversed(dtypes))),
        started(tmp_path, " ".join(dtypes), NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=""),
    ]
    for process in processes:
        assert answer(process)[0] == [20.0] * 4
    assert len(list(tmp_path.iterdir())) == 2 * len(dtypes)
    assert answer(started(tmp_path, " ".join(dtypes))) == [[20.0] * 4, 0]


def test_a_folder_that_cannot_be_written_changes_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for misses in (1, 1):
        function = kept(tmp_path / "file" / "kernels")
        assert function(np.arange(4.0)) == 12.0
        assert sum(function.stats.cache_misses.values()) == misses
