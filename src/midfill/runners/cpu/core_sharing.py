"""Core sharing: on how many threads steps run while other processes want the cores, too.

The threads of a step meet at barriers some hundred times, so where one of them has to wait for its
core, all do: beside one process that never rests, two threads on two cores are slower than one of
them alone. So a step runs on fewer threads while its threads wait for cores. Results don't depend
on their number.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from midfill.kernels.cpu.thread_pool import ThreadPool
from midfill.system.run_delay import RunDelays

_log = logging.getLogger(__name__)

_WINDOW_SECONDS = 0.02
"""Time in steps after which the number of threads is judged: some of the slices of a few
milliseconds in which a system shares a core."""
_GAP_SECONDS = 0.003
"""Longest time between two steps of one window. Threads on standby wait for cores between steps
without delaying anything."""
_SHORTEST_HOLD, _LONGEST_HOLD = 0.05, 1.0
"""Seconds for which fewer threads run until one more is tried. Doubled each time that it fails."""
_STRIKES = 2
"""Windows in a row after which fewer threads run. The server, when requests arrive, takes a core
for the time of one."""
_WORTH = 0.8
"""Threads wait for cores as long as this share of one thread's time: it takes more than it
gives."""


@dataclass
class ThreadCount:
    """How many threads pay, by what has been seen of them.

    Attributes:
        most: threads at most.
        current: threads that run.
    """

    most: int
    current: int
    _hold: float = _SHORTEST_HOLD
    _retry_at: float = 0.0
    _strikes: int = 0

    @classmethod
    def of(cls, threads: int) -> "ThreadCount":
        """Return the beginning: all threads."""
        return cls(threads, threads)

    def try_more(self, now: float) -> None:
        """Add a thread, once fewer have run for long enough.

        Args:
            now: time in seconds, on any clock that never runs backwards.
        """
        if self.current < self.most and now >= self._retry_at:
            self.current += 1

    def observe(self, now: float, seconds: float, delay: float) -> None:
        """Judge the current number of threads.

        Args:
            now: as in ``try_more``.
            seconds: that they have spent in steps.
            delay: seconds that they waited for cores meanwhile, all together.
        """
        if self.current == 1 or delay * self.current <= _WORTH * seconds:
            self._strikes = 0
            if self.current == self.most:
                self._hold = _SHORTEST_HOLD
            return
        self._strikes += 1
        if self._strikes < _STRIKES and self._hold == _SHORTEST_HOLD:
            return  # otherwise, it has been so just before
        self.current -= 1
        self._retry_at = now + max(self._hold, 10.0 * seconds)
        self._hold = min(2.0 * self._hold, _LONGEST_HOLD)


class CoreSharing:
    """Runs kernels of a pool on as many of its threads as pay."""

    def __init__(
        self,
        pool: ThreadPool,
        delays: RunDelays | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin with all threads.

        Args:
            pool: the threads.
            delays: says how long they wait for cores.
            clock: tells the time in seconds.
        """
        self._pool = pool
        self._delays = delays or RunDelays()
        self._clock = clock
        self._count = ThreadCount.of(pool.threads)
        self._ended = 0.0  # when the last kernel did
        self._spent = 0.0  # of the window, in kernels
        self._threads: list[int] = []  # of the window, the calling one first
        self._delay_before: float | None = None
        self._told = self._paused = False

    @contextmanager
    def all_threads(self) -> Iterator[None]:
        """Run kernels on all threads, for measurements that compare some with others."""
        self._paused, self._spent = True, 0.0
        self._pool.running = self._pool.threads
        try:
            yield
        finally:
            self._paused = False

    def waited(self) -> float | None:
        """Return the seconds that all threads have waited for cores so far, all together.

        Returns:
            None where the system doesn't say.
        """
        return self._delays.total(self._pool.thread_ids())

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a kernel on standby, see ``ThreadPool.run_on_standby``."""
        if self._pool.threads == 1 or self._paused:
            self._pool.run_on_standby(function, *arguments)
            return
        started = self._clock()
        if started - self._ended > _GAP_SECONDS or not self._spent:
            self._begin_window(started)
        self._pool.run_on_standby(function, *arguments)
        self._ended = self._clock()
        self._spent += self._ended - started
        if self._spent >= _WINDOW_SECONDS:
            self._end_window()

    def _begin_window(self, now: float) -> None:
        self._count.try_more(now)
        self._pool.running = self._count.current
        self._spent = 0.0
        self._threads = self._pool.thread_ids()[: self._pool.running]
        self._delay_before = self._delays.total(self._threads)

    def _end_window(self) -> None:
        after = self._delays.total(self._threads)
        self._spent, spent = 0.0, self._spent
        is_same = self._threads[0] == threading.get_native_id()  # who calls may change
        if after is None or self._delay_before is None or not is_same:
            return
        self._count.observe(self._ended, spent, after - self._delay_before)
        if self._count.current < self._pool.running and not self._told:
            self._told = True
            _log.info("other processes keep cores busy: steps run on fewer threads meanwhile")
