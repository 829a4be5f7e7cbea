"""Starts under bad conditions give the same answers: few cores, a full disk, company, damage.

Each start is a process with a cache folder of its own. Compiled kernels are shared with the other
tests. Where they can't be stored, LLVM optimises nothing: answers don't depend on it, and compiling
takes a third of the time.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import write_tiny

import midfill
from midfill.kernels.cpu.jit import compiled_folder
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.packed_model import load_packed
from midfill.system.cache import cache_folder, store_file

PROGRAM = Path(__file__).parent / "start_program.py"
CORES = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Outcome:
    """What a start reported, and the lines it wrote to standard error."""

    report: dict[str, Any]
    lines: list[str]

    @property
    def answer(self) -> tuple[list[int], str]:
        return self.report["tokens"], self.report["logits"]


@dataclass(frozen=True)
class Starter:
    """Starts the program on a tiny checkpoint."""

    checkpoint: Path

    def begin(
        self,
        cache: Path,
        *,
        threads: int = 2,
        limits: Callable[[], None] | None = None,
        optimised: bool = True,
    ) -> "subprocess.Popen[str]":
        environment = os.environ | {"MIDFILL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        if not optimised:
            environment["NUMBA_OPT"] = "0"
        if cache.is_dir() and not (cache / "kernels").exists():
            kernels = cache_folder() / "kernels"
            kernels.mkdir(parents=True, exist_ok=True)
            (cache / "kernels").symlink_to(kernels)
        return subprocess.Popen(
            [sys.executable, PROGRAM, self.checkpoint, str(threads)],
            env=environment, preexec_fn=limits, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def start(self, cache: Path, **how: Any) -> Outcome:
        return finish(self.begin(cache, **how))


def finish(process: "subprocess.Popen[str]") -> Outcome:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return Outcome(json.loads(out), errors.splitlines())


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Starter:
    return Starter(write_tiny("llama", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def usual(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A start on two threads under normal conditions; it leaves the kernels compiled."""
    return starter.start(tmp_path_factory.mktemp("usual"))


def packed(cache: Path) -> list[Path]:
    """The files with packed weights, those that were left half-written too."""
    return sorted((cache / "packed").iterdir()) if (cache / "packed").exists() else []


def one_core() -> None:
    os.sched_setaffinity(0, CORES[:1])


def no_large_files() -> None:
    """Room for a part of the tiny model's weights, then none."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def no_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


class TestCores:
    def test_on_one_core_one_thread_works(
        self, starter: Starter, usual: Outcome, tmp_path: Path
    ) -> None:
        alone = starter.start(tmp_path, threads=0, limits=one_core)
        assert alone.report["threads"] == 1
        assert alone.answer == usual.answer

    @pytest.mark.parametrize("limits", [None, one_core], ids=["all cores", "one core"])
    def test_more_threads_than_cores_give_the_same_answer(
        self, starter: Starter, usual: Outcome, tmp_path: Path, limits: Callable[[], None] | None
    ) -> None:
        crowded = starter.start(tmp_path, threads=len(CORES) + 3, limits=limits)
        assert crowded.report["threads"] == len(CORES) + 3
        assert crowded.answer == usual.answer


class TestNoRoom:
    @pytest.mark.slow
    def test_a_cache_folder_that_cannot_be_made_costs_time_and_one_line(
        self, starter: Starter, usual: Outcome, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        outcome = starter.start(tmp_path / "file" / "cache", optimised=False)
        assert outcome.answer == usual.answer
        assert outcome.report["packed"]
        assert outcome.report["compiled"]
        (line,) = outcome.lines
        assert "can't write to the cache folder" in line
        assert str(tmp_path / "file" / "cache") in line
        assert "set MIDFILL_CACHE" in line
        # Nor is code kept anywhere else, where it could outlive its source.
        assert not list(Path(midfill.__file__).parent.rglob("*.nb[ci]"))

    def test_a_full_disk_leaves_nothing_that_a_later_start_would_trust(
        self, starter: Starter, usual: Outcome, tmp_path: Path
    ) -> None:
        outcome = starter.start(tmp_path, limits=no_large_files)
        assert outcome.answer == usual.answer
        (line,) = outcome.lines
        assert "File too large" in line
        assert packed(tmp_path) == []

        later = starter.start(tmp_path)
        assert later.answer == usual.answer
        assert later.report["packed"]
        assert later.lines == []
        assert len(packed(tmp_path)) == 1

    def test_a_read_only_folder_serves_what_is_in_it(
        self, starter: Starter, usual: Outcome, tmp_path: Path
    ) -> None:
        starter.start(tmp_path)
        outcome = starter.start(tmp_path, limits=no_files)
        assert outcome.answer == usual.answer
        assert not outcome.report["packed"]
        assert not outcome.report["compiled"]
        assert outcome.lines == []

    def test_partial_files_of_killed_processes_are_removed_once_they_are_old(
        self, tmp_path: Path
    ) -> None:
        kept: list[Path] = []
        store_file(tmp_path / "first", lambda path: kept.append(path) or path.touch())
        old, new = kept[0], kept[0].with_name(f".second{kept[0].suffix}")
        old.touch()
        new.touch()
        os.utime(old, (0, 0))
        store_file(tmp_path / "third", Path.touch)
        assert sorted(tmp_path.iterdir()) == sorted([new, tmp_path / "first", tmp_path / "third"])


class TestConcurrentStarts:
    def test_two_starts_at_once_into_a_cache_of_kernels_alone(
        self, starter: Starter, usual: Outcome, tmp_path: Path
    ) -> None:
        """What they compile at once is in tests/kernels/cpu/test_compiled.py."""
        kernels = tmp_path / "kernels" / compiled_folder().name
        shutil.copytree(compiled_folder(), kernels, ignore=shutil.ignore_patterns(".*", "tiles-*"))
        both = [starter.begin(tmp_path) for _ in range(2)]
        outcomes = [finish(process) for process in both]
        for outcome in outcomes:
            assert outcome.answer == usual.answer
            assert outcome.lines == []
            assert not outcome.report["compiled"]
        # The later one may find what the other stored.
        assert any(outcome.report["packed"] for outcome in outcomes)
        assert len(packed(tmp_path)) == len(list(kernels.glob("tiles-*"))) == 1

        third = starter.start(tmp_path)
        assert third.answer == usual.answer
        assert not third.report["packed"]
        assert not third.report["compiled"]


class TestDamage:
    @pytest.mark.parametrize("size", [0, 5, 1000, -1])
    def test_truncated_packed_weights_are_packed_again(
        self, starter: Starter, tmp_path: Path, size: int
    ) -> None:
        checkpoint = open_checkpoint(starter.checkpoint)
        first = load_packed(checkpoint, "q8", folder=tmp_path)
        (file,) = tmp_path.iterdir()
        whole = file.read_bytes()
        file.write_bytes(whole[:size])
        again = load_packed(checkpoint, "q8", folder=tmp_path)
        for name, matrix in first.matrices.items():
            np.testing.assert_array_equal(again.matrices[name].packed, matrix.packed)
        assert file.read_bytes() == whole
        assert list(tmp_path.iterdir()) == [file]
