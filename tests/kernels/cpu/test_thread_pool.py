"""The thread pool: barriers order the phases, and a failure on any thread is reported."""

import gc
import threading

import numpy as np
import pytest

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.thread_pool import ThreadPool, barrier, take_work


@kernel
def _phases(thread, threads, sync, items, sums):  # type: ignore[no-untyped-def]
    """Add up in each phase what all threads wrote in the one before."""
    for phase in range(len(sums)):
        while True:
            item = take_work(sync, 1)
            if item >= len(items):
                break
            items[item] += item + phase
        barrier(sync, threads)
        if thread == phase % threads:
            sums[phase] = items.sum()
        barrier(sync, threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_phases_never_overlap(threads: int) -> None:
    pool = ThreadPool(threads)
    count, phases = 37, 300
    items, sums = np.zeros(count, np.int64), np.zeros(phases, np.int64)
    _phases(0, 1, np.zeros_like(pool.sync), items.copy(), sums[:0])
    pool.run(_phases, items, sums)
    pool.close()
    each = np.cumsum([count * phase + count * (count - 1) // 2 for phase in range(phases)])
    np.testing.assert_array_equal(sums, each)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_any_thread_reaches_the_caller(failing: int) -> None:
    def fail(thread: int, threads: int, sync: np.ndarray) -> None:
        if thread == failing:
            raise ValueError(f"thread {thread} failed")

    pool = ThreadPool(2)
    with pytest.raises(ValueError, match=f"thread {failing} failed"):
        pool.run(fail)
    done: list[int] = []
    pool.run(lambda thread, threads, sync: done.append(thread))
    pool.close()
    assert sorted(done) == [0, 1]


def test_threads_end_when_the_pool_is_closed_or_collected() -> None:
    def workers() -> int:
        return sum(thread.name.startswith("kernel-") for thread in threading.enumerate())

    before = workers()
    closed, collected = ThreadPool(3), ThreadPool(2)
    assert workers() == before + 3
    closed.close()
    assert workers() == before + 1
    del collected
    gc.collect()
    assert workers() == before
