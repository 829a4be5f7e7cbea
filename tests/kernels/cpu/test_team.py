"""The team: barriers order the phases, and a failure on any thread is reported."""

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


def test_a_failure_on_another_thread_reaches_the_caller() -> None:
    def fail(thread: int, threads: int, sync: np.ndarray) -> None:
        if thread == 1:
            raise ValueError("thread 1 failed")

    team = Team(2)
    with pytest.raises(ValueError, match="thread 1 failed"):
        team.run(fail)
    done: list[int] = []
    team.run(lambda thread, threads, sync: done.append(thread))
    team.close()
    assert sorted(done) == [0, 1]
