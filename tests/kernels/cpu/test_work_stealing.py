"""Threads share a phase's items: long runs first, then ever shorter ones, whoever is free."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.kernels.cpu.jit import entry_point
from midfill.kernels.cpu.standby import sync_size
from midfill.kernels.cpu.thread_pool import GENERATION, ThreadContext, ThreadPool, barrier
from midfill.kernels.cpu.work_stealing import next_run


@entry_point
def run_of(thread, threads, sync, clock, turn, items):  # type: ignore[no-untyped-def]
    return next_run(ThreadContext(thread, threads, sync, clock), turn, items)


@entry_point
def count_visits(thread, threads, sync, clock, visits):  # type: ignore[no-untyped-def]
    """Add one to every item, phase after phase."""
    context = ThreadContext(thread, threads, sync, clock)
    for phase in range(len(visits)):
        turn = 0
        while True:
            first, end = next_run(context, turn, len(visits[phase]))
            if first >= len(visits[phase]):
                break
            turn += 1
            for item in range(first, end):
                visits[phase, item] += 1
        barrier(sync, threads)


def clocks(threads: int) -> np.ndarray:
    return np.zeros((threads, 16), np.int64)


class Phase:
    """One phase whose threads take their runs in any order."""

    def __init__(self, threads: int, items: int, generation: int = 0) -> None:
        self.threads, self.items = threads, items
        self.sync = np.zeros(sync_size(threads), np.int64)
        self.sync[GENERATION] = generation
        self._turns = [0] * threads

    def next_run(self, thread: int) -> tuple[int, int]:
        turn, self._turns[thread] = self._turns[thread], self._turns[thread] + 1
        return run_of(thread, self.threads, self.sync, clocks(self.threads), turn, self.items)

    def next_phase(self) -> None:
        self.sync[GENERATION] += 1
        self._turns = [0] * self.threads


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 60), st.sampled_from([0, 3, 2**31 - 1, 2**33]), st.data())
def test_every_item_is_taken_once_in_whatever_order_threads_come(
    threads: int, items: int, generation: int, data: st.DataObject
) -> None:
    phase = Phase(threads, items, generation)
    for _ in range(2):
        taken: list[int] = []
        working = list(range(threads))
        while working:
            thread = data.draw(st.sampled_from(working))
            first, end = phase.next_run(thread)
            taken += range(first, end)
            if first == items:
                working.remove(thread)
        assert sorted(taken) == list(range(items))
        phase.next_phase()


def test_a_thread_takes_most_of_its_share_at_once_and_then_half_of_what_is_left() -> None:
    phase = Phase(2, 32)
    assert [phase.next_run(1) for _ in range(4)] == [(16, 28), (28, 30), (30, 31), (31, 32)]
    phase = Phase(2, 256)
    runs = [phase.next_run(0) for _ in range(7)]
    assert [end - first for first, end in runs] == [96, 16, 8, 4, 2, 1, 1]


def test_a_thread_that_is_done_takes_what_a_slower_one_has_left() -> None:
    phase = Phase(2, 32)
    runs = [phase.next_run(1) for _ in range(7)]
    assert runs[4:] == [(12, 14), (14, 15), (15, 16)]
    assert phase.next_run(1) == (32, 32)
    assert [phase.next_run(0) for _ in range(2)] == [(0, 12), (32, 32)]


def test_a_single_thread_takes_all_at_once() -> None:
    phase = Phase(1, 7)
    assert [phase.next_run(0) for _ in range(2)] == [(0, 7), (7, 7)]


@pytest.mark.parametrize("threads", [2, 5])
def test_running_threads_take_every_item_of_every_phase_once(threads: int) -> None:
    visits = np.zeros((300, 37), np.int64)
    count_visits(0, 1, np.zeros(sync_size(1), np.int64), clocks(1), visits[:0].copy())
    pool = ThreadPool(threads)
    pool.run(count_visits, clocks(threads), visits)
    pool.close()
    np.testing.assert_array_equal(visits, 1)
