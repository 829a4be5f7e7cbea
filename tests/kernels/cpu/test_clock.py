"""The phase clock: each thread's time counts for the phase in which it was spent."""

import platform
import time

import numpy as np
import pytest

from midfill.kernels.cpu.clock import (
    CLOCK_WIDTH,
    DOWN,
    HEAD,
    PHASES,
    QKV,
    WAIT,
    end_phase,
    lap,
    start_clock,
)
from midfill.kernels.cpu.thread_pool import ThreadContext, ThreadPool

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"),
    reason="no counter that a program may read",
)
LAST_READING = len(PHASES)


def spent(clock: np.ndarray) -> dict[int, int]:
    """Return one thread's ticks by phase, without phases that have none."""
    return {phase: int(ticks) for phase, ticks in enumerate(clock[:LAST_READING]) if ticks}


def test_all_time_since_the_start_counts_for_the_named_phases() -> None:
    clock = np.zeros((2, CLOCK_WIDTH), np.int64)
    start_clock(clock, 1)
    started = clock[1, LAST_READING]
    for phase in (QKV, DOWN, QKV):
        time.sleep(0.001)
        lap(clock, 1, phase)
    assert spent(clock[1]).keys() == {QKV, DOWN}
    assert sum(spent(clock[1]).values()) == clock[1, LAST_READING] - started
    assert not clock[0].any()


def test_time_before_the_start_counts_for_nothing() -> None:
    clock = np.zeros((1, CLOCK_WIDTH), np.int64)
    start_clock(clock, 0)
    lap(clock, 0, QKV)
    before = spent(clock[0])
    time.sleep(0.001)
    start_clock(clock, 0)
    assert spent(clock[0]) == before


def test_a_barrier_ends_a_phase_and_the_rest_is_waiting() -> None:
    clock = np.zeros((2, CLOCK_WIDTH), np.int64)
    started = np.zeros(2, np.int64)

    def phase(thread: int, threads: int, sync: np.ndarray) -> None:
        start_clock(clock, thread)
        started[thread] = clock[thread, LAST_READING]
        end_phase(ThreadContext(thread, threads, sync, clock), HEAD)

    pool = ThreadPool(2)
    pool.run(phase)
    pool.close()
    for thread in range(2):
        assert spent(clock[thread]).keys() == {HEAD, WAIT}
        total = clock[thread, LAST_READING] - started[thread]
        assert sum(spent(clock[thread]).values()) == total
