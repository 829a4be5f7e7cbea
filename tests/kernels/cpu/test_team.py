"""The team: barriers order the phases, and a failure on any thread is reported."""

import gc
import threading

import numpy as np
import pytest

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.team import Team, barrier, take_work


@kernel
def _phases(thread, threads, sync, cells, sums):  # type: ignore[no-untyped-def]
    """Each phase adds up what the whole team wrote in the one before."""
    for phase in range(len(sums)):
        while True:
            item = take_work(sync, 1)
            if item >= len(cells):
                break
            cells[item] += item + phase
        barrier(sync, threads)
        if thread == phase % threads:
            sums[phase] = cells.sum()
        barrier(sync, threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_phases_never_overlap(threads: int) -> None:
    team = Team(threads)
    items, phases = 37, 300
    cells, sums = np.zeros(items, np.int64), np.zeros(phases, np.int64)
    _phases(0, 1, np.zeros_like(team.sync), cells.copy(), sums[:0])
    team.run(_phases, cells, sums)
    team.close()
    each = np.cumsum([items * phase + items * (items - 1) // 2 for phase in range(phases)])
    np.testing.assert_array_equal(sums, each)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_any_thread_reaches_the_caller(failing: int) -> None:
    def fail(thread: int, threads: int, sync: np.ndarray) -> None:
        if thread == failing:
            raise ValueError(f"thread {thread} failed")

    team = Team(2)
    with pytest.raises(ValueError, match=f"thread {failing} failed"):
        team.run(fail)
    done: list[int] = []
    team.run(lambda thread, threads, sync: done.append(thread))
    team.close()
    assert sorted(done) == [0, 1]


def test_threads_end_with_the_team_closed_or_forgotten() -> None:
    def workers() -> int:
        return sum(thread.name.startswith("kernel-") for thread in threading.enumerate())

    before = workers()
    closed, forgotten = Team(3), Team(2)
    assert workers() == before + 3
    closed.close()
    assert workers() == before + 1
    del forgotten
    gc.collect()
    assert workers() == before
