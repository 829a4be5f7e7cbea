"""Workers on standby run a kernel again with what the caller published, without Python."""

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from midfill.kernels.cpu.jit import entry_point
from midfill.kernels.cpu.standby import (
    AWAY,
    WAITING,
    WORKER_SLOTS,
    await_run,
    current_run,
    publish,
    published,
    running_threads,
    signature_of,
    start_workers,
)
from midfill.kernels.cpu.thread_pool import ThreadPool, barrier


class Terms(NamedTuple):
    values: npt.NDArray[np.int64]
    factor: int


@entry_point
def add_up(thread, threads, sync, terms, sums):  # type: ignore[no-untyped-def]
    """Add factor * values[thread] to sums[thread]."""
    arguments = (terms, sums)
    signature = signature_of(arguments)
    if thread == 0:
        publish(sync, arguments)
        if start_workers(sync, threads, signature):
            sums[0] += terms.factor * terms.values[0]
            barrier(sync, threads)
        return
    running = True
    while running:
        run = current_run(sync)
        own, into = arguments
        into[thread] += own.factor * own.values[thread]
        barrier(sync, running_threads(sync))
        running = await_run(sync, thread, run, signature)
        if running:
            arguments = published(sync, arguments)


def states(pool: ThreadPool) -> list[int]:
    return [int(pool.sync[WORKER_SLOTS + 16 * thread]) for thread in range(1, pool.threads)]


@pytest.fixture(params=[1, 2, 4])
def pool(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


def test_each_run_sees_its_own_arguments_on_every_thread(pool: ThreadPool) -> None:
    for run in range(200):
        # Other arrays in every run: workers must not keep those of the first.
        terms = Terms(np.arange(pool.threads) + run, run)
        sums = np.zeros(pool.threads, np.int64)
        pool.run_on_standby(add_up, terms, sums)
        expected = run * (np.arange(pool.threads) + run)
        np.testing.assert_array_equal(sums, expected)


def test_a_run_leaves_out_the_threads_that_others_need() -> None:
    pool = ThreadPool(4)
    sums, expected = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for run in range(100):
        pool.running = 1 + run % 4
        pool.run_on_standby(add_up, Terms(np.ones(4, np.int64), run), sums)
        expected[: pool.running] += run
    pool.close()
    np.testing.assert_array_equal(sums, expected)


def test_workers_return_to_python_for_other_functions_and_after_a_while() -> None:
    pool = ThreadPool(3)
    sums = np.zeros(3, np.int64)
    terms = Terms(np.ones(3, np.int64), 1)
    pool.run_on_standby(add_up, terms, sums)
    called: list[int] = []
    pool.run(lambda thread, threads, sync: called.append(thread))
    assert sorted(called) == [0, 1, 2]
    pool.run_on_standby(add_up, terms, sums)
    while WAITING in states(pool):
        time.sleep(0.01)
    assert states(pool) == [AWAY, AWAY]
    pool.run_on_standby(add_up, terms, sums)
    pool.close()
    assert sums.tolist() == [3, 3, 3]


def test_arguments_of_another_type_are_never_read_as_the_former_ones() -> None:
    pool = ThreadPool(2)
    sums, terms = np.zeros(2, np.int64), Terms(np.ones(2, np.int64), 1)
    fractions, halves = np.zeros(2), Terms(np.full(2, 2, np.int64), 3)
    for _ in range(50):
        pool.run_on_standby(add_up, terms, sums)
        pool.run_on_standby(add_up, halves, fractions)
    pool.close()
    assert sums.tolist() == [50, 50]
    assert fractions.tolist() == [300.0, 300.0]
