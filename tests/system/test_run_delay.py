"""Waiting times are read as Linux counts them, and unknown elsewhere."""

import threading
from pathlib import Path

import pytest

from midfill.system.run_delay import RunDelays


def write(folder: Path, thread: int, text: str) -> None:
    (folder / str(thread)).mkdir(exist_ok=True)
    (folder / str(thread) / "schedstat").write_text(text)


def test_what_threads_waited_is_added_up_as_it_grows(tmp_path: Path) -> None:
    delays = RunDelays(tmp_path)
    write(tmp_path, 7, "5000000000 1500000000 12\n")
    write(tmp_path, 9, "100 500000000 3\n")
    assert delays.total([7, 9]) == pytest.approx(2.0)
    write(tmp_path, 9, "100 750000000 4\n")
    assert delays.total([7, 9]) == pytest.approx(2.25)
    assert delays.total([7]) == pytest.approx(1.5)


@pytest.mark.parametrize("text", ["", "12\n", "a b c\n"])
def test_a_system_that_says_something_else_says_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, 7, text)
    assert RunDelays(tmp_path).total([7]) is None


def test_threads_that_have_ended_are_unknown(tmp_path: Path) -> None:
    assert RunDelays(tmp_path).total([7]) is None


def test_a_thread_that_gets_the_id_of_one_that_has_ended_is_another(tmp_path: Path) -> None:
    delays = RunDelays(tmp_path)
    write(tmp_path, 7, "1 1000000000 1\n")
    assert delays.total([7]) == pytest.approx(1.0)
    write(tmp_path, 7, "")  # as it reads once the thread has ended
    assert delays.total([7]) is None
    (tmp_path / "7" / "schedstat").unlink()
    write(tmp_path, 7, "1 250000000 1\n")
    assert delays.total([7]) == pytest.approx(0.25)


def test_only_the_files_of_the_threads_that_were_asked_for_last_stay_open(tmp_path: Path) -> None:
    delays = RunDelays(tmp_path)
    for thread in range(100):
        write(tmp_path, thread, f"1 {thread} 1\n")
        assert delays.total([thread]) == pytest.approx(thread / 1e9)
    assert len(delays._files) == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no Linux")
def test_this_thread_has_waited_for_some_time_or_none() -> None:
    delays = RunDelays()
    before = delays.total([threading.get_native_id()])
    if before is None:
        pytest.skip("this kernel doesn't count it")
    after = delays.total([threading.get_native_id()])
    assert after is not None
    assert 0.0 <= before <= after
