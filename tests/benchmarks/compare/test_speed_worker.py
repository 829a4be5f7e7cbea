"""A version in a process of its own: what it answers, how it fails, and that it always ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import default_interrupt, is_running, wait_for
from tiny_gguf import write_gguf
from version_stand_ins import write_stand_in

import midfill
from benchmarks.compare.copies import Version, VersionCopy
from benchmarks.compare.speed_worker import SpeedWorker
from midfill.errors import MidfillError

ROOT = Path(__file__).parents[3]
SOURCES = (ROOT / "src", ROOT)


def version(source: Path) -> VersionCopy:
    return VersionCopy("old", Version(commit="a" * 40), source)


@pytest.fixture
def stand_in(tmp_path: Path, log: Path) -> VersionCopy:
    return version(write_stand_in(tmp_path / "src", "old").parent)


def change(copy: VersionCopy, before: str, after: str) -> None:
    """Change the source of a stand-in."""
    path = copy.source / "midfill" / "__init__.py"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_the_package_itself_answers(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    with SpeedWorker(version(Path(midfill.__file__).parents[1]), tmp_path) as worker:
        worker.load(str(model), threads=1)
        prefill = worker.measure(list(range(10, 74)), 1)
        assert prefill.first_seconds > 0
        assert prefill.later_tokens == 0
        decode = worker.measure(list(range(20, 52)), 16)
        assert decode.later_seconds > 0
        assert 0 < decode.later_tokens < 16
        prompts = [list(range(first, first + 24)) for first in (20, 30, 40)]
        assert worker.measure_streams(prompts, 8) > 0


def test_the_first_token_is_timed_apart_from_the_rest(
    stand_in: VersionCopy, tmp_path: Path
) -> None:
    with SpeedWorker(stand_in, tmp_path) as worker:
        worker.load("model", None)
        timing = worker.measure([5, 6, 7], 8)
    assert timing.first_seconds == pytest.approx(0.03)
    assert timing.later_seconds == pytest.approx(0.7)
    assert timing.later_tokens == 7


class TestFailing:
    def test_one_that_can_not_load_is_named_with_its_last_words(
        self, stand_in: VersionCopy, tmp_path: Path
    ) -> None:
        change(stand_in, "assert not speculation", "raise OSError('no such model')")
        with SpeedWorker(stand_in, tmp_path) as worker:
            expected = r"(?s)^old \(a{10}\) ended with 1: .*OSError: no such model$"
            with pytest.raises(MidfillError, match=expected):
                worker.load("model", None)

    def test_one_that_is_killed_is_named_with_the_signal(
        self, stand_in: VersionCopy, tmp_path: Path
    ) -> None:
        change(stand_in, "yield Delta(1)", "os.kill(os.getpid(), 9); yield")
        with SpeedWorker(stand_in, tmp_path) as worker:
            worker.load("model", None)
            killed = r"^old \(a{10}\) was ended by SIGKILL: loading model$"
            with pytest.raises(MidfillError, match=killed):
                worker.measure([1], 2)
            with pytest.raises(MidfillError, match=killed):  # and once more
                worker.measure([1], 2)

    @pytest.mark.parametrize("printed", ["hello", "{}", "[1]"])
    def test_one_that_prints_what_is_no_answer(
        self, stand_in: VersionCopy, tmp_path: Path, printed: str
    ) -> None:
        (stand_in.source / "sitecustomize.py").write_text(f"print({printed!r})", "utf-8")
        with SpeedWorker(stand_in, tmp_path) as worker:
            expected = rf"^old \(a{{10}}\) answered {re.escape(repr(printed))}: "
            with pytest.raises(MidfillError, match=expected):
                worker.load("model", None)


class TestEnding:
    def test_it_ends_with_the_context(self, stand_in: VersionCopy, tmp_path: Path) -> None:
        with SpeedWorker(stand_in, tmp_path) as worker:
            worker.load("model", None)
            process_id = worker.process_id
            assert is_running(process_id)
        assert not is_running(process_id)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
    def test_it_ends_with_the_comparison(
        self, stand_in: VersionCopy, tmp_path: Path, number: signal.Signals
    ) -> None:
        if number != signal.SIGKILL:  # busy; where it is told nothing, it ends when it is done
            change(stand_in, "yield Delta(1)", "time.sleep(60)")
        program = f"""
from pathlib import Path
from benchmarks.compare.copies import Version, VersionCopy
from benchmarks.compare.speed_worker import SpeedWorker
from midfill.system.process import ended_by_sigterm
copy = VersionCopy("old", Version(commit="a"), Path({str(stand_in.source)!r}))
with ended_by_sigterm(), SpeedWorker(copy, Path({str(tmp_path)!r})) as worker:
    worker.load("model", None)
    print(worker.process_id, flush=True)
    while True:
        worker.measure([1], 2)
"""
        comparison = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=default_interrupt,
        )
        assert comparison.stdout is not None
        process_id = int(comparison.stdout.readline())
        assert is_running(process_id)
        comparison.send_signal(number)
        comparison.communicate(timeout=60)
        wait_for(lambda: not is_running(process_id))
