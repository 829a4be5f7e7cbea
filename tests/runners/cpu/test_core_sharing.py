"""Fewer threads run while threads wait for cores, and one more is tried now and then."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from midfill.kernels.cpu.thread_pool import ThreadPool
from midfill.runners.cpu.core_sharing import CoreSharing, ThreadCount
from midfill.system.run_delay import RunDelays

WINDOW = 0.02


def watch(count: ThreadCount, now: float, waiting: float) -> None:
    """Observe a window in which threads wait for so many windows' time."""
    count.observe(now, WINDOW, waiting * WINDOW)


class TestThreadCount:
    def test_all_threads_run_while_cores_are_there(self) -> None:
        count = ThreadCount.of(4)
        for place in range(10):
            watch(count, place * WINDOW, 0.1)
        assert count.current == 4

    def test_one_bad_window_may_be_a_request_that_arrives(self) -> None:
        count = ThreadCount.of(2)
        for place in range(10):
            watch(count, place * WINDOW, 0.9 if place % 2 else 0.0)
        assert count.current == 2

    def test_a_thread_that_takes_more_than_it_gives_is_left_out(self) -> None:
        few, many = ThreadCount.of(2), ThreadCount.of(8)
        for place in range(2):
            watch(few, place * WINDOW, 0.3)  # of two threads, each gives half of the speed
            watch(many, place * WINDOW, 0.3)  # of eight, an eighth
        assert (few.current, many.current) == (2, 7)

    def test_one_thread_always_runs(self) -> None:
        count = ThreadCount.of(2)
        for place in range(10):
            watch(count, place * WINDOW, 2.0)
        assert count.current == 1

    def test_another_is_tried_after_a_while_and_left_out_again_at_once(self) -> None:
        count = ThreadCount.of(2)
        now, holds = 0.0, []
        for _ in range(2):
            watch(count, now, 0.9)
        for _ in range(6):
            left_out = now
            while count.current == 1:
                now += 0.01
                count.try_more(now)
            holds.append(now - left_out)
            now += WINDOW
            watch(count, now, 0.9)
        assert count.current == 1
        # Ten times what the attempt took at least, and twice as long after each.
        assert holds == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.8, 1.0], abs=0.02)

    def test_once_all_threads_run_again_the_past_is_forgotten(self) -> None:
        count = ThreadCount.of(2)
        for now in (0.0, 0.02, 0.3):
            count.try_more(now)
            watch(count, now, 0.9)
        count.try_more(5.0)
        watch(count, 5.0, 0.0)
        watch(count, 5.1, 0.9)
        assert count.current == 2


class TimedPool(ThreadPool):
    """Threads whose kernels only take their time.

    Attributes:
        now: the time.
        used: how many threads each run had.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.now = 0.0
        self.used: list[int] = []

    def run_on_standby(self, function: object, *arguments: object) -> None:
        self.used.append(self.running)
        self.now += 0.00501  # four to a window


class SharedCore(RunDelays):
    """The second thread's core is another's for half of the time, while ``busy``."""

    def __init__(self, pool: TimedPool) -> None:
        super().__init__()
        self._pool = pool
        self.busy = True

    def total(self, threads: Iterable[int]) -> float | None:
        return 0.5 * self._pool.now if self.busy and len(list(threads)) > 1 else 0.0


@pytest.fixture
def pool():  # type: ignore[no-untyped-def]
    pool = TimedPool(2)
    yield pool
    pool.close()


def test_steps_leave_a_core_to_others_until_it_is_free_again(pool: TimedPool) -> None:
    delays = SharedCore(pool)
    sharing = CoreSharing(pool, delays, lambda: pool.now)

    def steps(count: int) -> list[int]:
        pool.used.clear()
        for _ in range(count):
            sharing.run(print)
            pool.now += 0.0005  # between two steps
        return pool.used

    assert steps(9)[:8] == [2] * 8
    crowded = steps(1000)
    assert np.mean(np.array(crowded) == 1) > 0.9
    delays.busy = False
    steps(200)  # at most a second
    assert steps(100) == [2] * 100


def test_waiting_between_steps_delays_none(pool: TimedPool) -> None:
    sharing = CoreSharing(pool, SharedCore(pool), lambda: pool.now)
    for _ in range(100):
        sharing.run(print)
        pool.now += 0.02  # an engine that waits for requests
    assert set(pool.used) == {2}


def test_measurements_have_all_threads(pool: TimedPool) -> None:
    sharing = CoreSharing(pool, SharedCore(pool), lambda: pool.now)
    for _ in range(20):
        sharing.run(print)
    assert pool.used[-1] == 1
    with sharing.all_threads():
        for _ in range(20):
            sharing.run(print)
    assert pool.used[-20:] == [2] * 20


def test_windows_in_which_callers_take_turns_say_nothing(pool: TimedPool) -> None:
    sharing = CoreSharing(pool, SharedCore(pool), lambda: pool.now)
    with ThreadPoolExecutor(1) as other:
        for _ in range(30):
            for _ in range(3):
                sharing.run(print)
            other.submit(sharing.run, print).result()  # ends the window of 20 ms
    assert set(pool.used) == {2}


def test_systems_that_count_no_waiting_use_all_threads(pool: TimedPool) -> None:
    class Unknown(RunDelays):
        def total(self, threads: Iterable[int]) -> float | None:
            return None

    sharing = CoreSharing(pool, Unknown(), lambda: pool.now)
    for _ in range(100):
        sharing.run(print)
    assert set(pool.used) == {2}
