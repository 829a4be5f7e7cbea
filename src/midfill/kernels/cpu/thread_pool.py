"""A pool of threads that run one compiled function together (SPMD).

A forward pass has hundreds of short parallel phases. Starting a parallel region for each would
take longer than some of them last. So the pool enters the compiled function once per step, and
its threads meet inside at barriers of a few hundred nanoseconds.

The threads share ``sync``, int64 [80]: counters at the indices below, each on its own cache lines.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from midfill.kernels.cpu.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    sched_yield,
    spin_pause,
)
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.memory import Int64Array

ARRIVED, GENERATION, WORK, STARTED, ENDED = 0, 16, 32, 48, 64
SYNC_SIZE = 80
SPINS_BEFORE_YIELD = 64
"""A few microseconds. A thread that spins for longer may hold the very core that the others wait
for; yielding a core that nobody else wants costs next to nothing."""
_YIELDS_BEFORE_SLEEP = 3000
"""Some milliseconds, longer than a busy engine takes from one step to the next: a core that went
to sleep needs a good part of a millisecond to wake up."""


class ThreadContext(NamedTuple):
    """One thread's view of a step.

    Attributes:
        thread: this thread's index, 0 <= thread < threads.
        threads: threads that run the step.
        sync: int64 [80], shared; see the module.
        clock: int64 [threads, 16], see clock.py.
    """

    thread: int
    threads: int
    sync: Int64Array
    clock: Int64Array


@kernel
def barrier(sync: Int64Array, threads: int) -> None:
    """Wait for all threads; then start the next phase's work at item 0."""
    if threads == 1:
        atomic_store(sync, WORK, 0)
        return
    generation = atomic_load(sync, GENERATION)
    if atomic_add(sync, ARRIVED, 1) == threads - 1:
        atomic_store(sync, ARRIVED, 0)
        atomic_store(sync, WORK, 0)
        atomic_store(sync, GENERATION, generation + 1)
        return
    spins = 0
    while atomic_load(sync, GENERATION) == generation:
        spin_pause()
        spins += 1
        if spins >= SPINS_BEFORE_YIELD:
            sched_yield()


@kernel
def take_work(sync: Int64Array, items: int) -> int:
    """Claim the next ``items`` work items of this phase and return the first."""
    return atomic_add(sync, WORK, items)


@entry_point
def _spin_until(sync: Int64Array, index: int, value: int) -> None:
    """Wait until sync[index] == value, but only for a while: the caller can also sleep."""
    spins = 0
    while atomic_load(sync, index) != value:
        spin_pause()
        spins += 1
        if spins >= SPINS_BEFORE_YIELD:
            sched_yield()
        if spins >= SPINS_BEFORE_YIELD + _YIELDS_BEFORE_SLEEP:
            return


_Task = tuple[int, Callable[..., None], tuple[Any, ...]]
_Outcome = tuple[int, BaseException | None]


class ThreadPool:
    """Threads that wait between steps; call ``run`` from one thread at a time.

    Tasks and outcomes are passed through queues. Before a thread sleeps in one, it spins for a
    while on a counter: STARTED holds the number of the latest run, ENDED the number of workers
    that have finished it.

    The threads end with ``close``, when the pool is garbage-collected, or with the program.

    Attributes:
        threads: threads that run a function, the calling one included.
        sync: int64 [80], the counters they share.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sync: Int64Array = np.zeros(SYNC_SIZE, np.int64)
        self._tasks: list[SimpleQueue[_Task | None]] = []
        self._done: SimpleQueue[_Outcome] = SimpleQueue()
        self._runs = 0
        workers = []
        for thread in range(1, threads):
            tasks: SimpleQueue[_Task | None] = SimpleQueue()
            self._tasks.append(tasks)
            # No reference to the pool itself, or it would live as long as its threads.
            arguments = (thread, threads, self.sync, tasks, self._done)
            workers.append(
                threading.Thread(target=_work, args=arguments, name=f"kernel-{thread}", daemon=True)
            )
            workers[-1].start()
        # Joined at exit: a thread that wakes up during interpreter shutdown can crash the process.
        self._end = weakref.finalize(self, _end_workers, self._tasks, workers)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call function(thread, threads, sync, *arguments) on every thread and wait for all.

        Raises:
            BaseException: the first failure of any thread.
        """
        self._runs += 1
        self.sync[ENDED] = 0
        for tasks in self._tasks:
            tasks.put((self._runs, function, arguments))
        self.sync[STARTED] = self._runs
        failures: list[BaseException] = []
        try:
            function(0, self.threads, self.sync, *arguments)
        except BaseException as failure:
            failures.append(failure)
        missing = len(self._tasks)
        _spin_until(self.sync, ENDED, missing)
        while missing:
            run, outcome = self._done.get()
            # An interrupted run (Ctrl-C) leaves outcomes behind; skip those of earlier runs.
            missing -= run == self._runs
            if outcome is not None and run == self._runs:
                failures.append(outcome)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads; ``run`` must not be called again."""
        self._end()


def _work(
    thread: int,
    threads: int,
    sync: Int64Array,
    tasks: "SimpleQueue[_Task | None]",
    done: "SimpleQueue[_Outcome]",
) -> None:
    """Run tasks until None arrives; the body of a worker thread."""
    run = 0
    while (task := tasks.get()) is not None:
        run, function, arguments = task
        outcome: BaseException | None = None
        try:
            function(thread, threads, sync, *arguments)
        except BaseException as failure:
            outcome = failure
        done.put((run, outcome))
        sync[ENDED] += 1  # if two threads collide here, the caller sleeps in the queue
        del task, function, arguments, outcome
        _spin_until(sync, STARTED, run + 1)


def _end_workers(
    queues: "list[SimpleQueue[_Task | None]]", workers: list[threading.Thread]
) -> None:
    for tasks in queues:
        tasks.put(None)
    for worker in workers:
        worker.join()
