"""A team of threads that run one compiled function together (SPMD).

A forward pass has hundreds of short parallel phases. Starting a parallel region for each costs
more than some of them last, so the team enters the compiled function once a step, and the
threads meet at barriers of a few hundred nanoseconds inside it.

``sync`` is an int64 array shared by the team; its cells lie on cache lines of their own.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    sched_yield,
    spin_pause,
)
from midfill.kernels.cpu.jit import entry_point, kernel

ARRIVED, GENERATION, WORK, STARTED, ENDED = 0, 16, 32, 48, 64
SYNC_CELLS = 80
SPINS_BEFORE_YIELD = 64
"""A few microseconds. Whoever spins on may hold the very core that the others wait for; a yield
on a core that nobody else wants costs next to nothing."""
_YIELDS_BEFORE_SLEEP = 3000
"""Some milliseconds, longer than a busy engine takes from one step to the next: a core that has
gone to sleep needs a good part of a millisecond to get back to work."""


@kernel
def barrier(sync: Any, threads: int) -> None:
    """Wait for the whole team; then the next phase's work starts at item 0."""
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
def take_work(sync: Any, items: int) -> int:
    """Claim the next ``items`` work items of this phase; returns the first."""
    return atomic_add(sync, WORK, items)


@entry_point
def _look_out(sync: Any, cell: int, value: int) -> None:
    """Wait until sync[cell] == value, but not for ever: whoever called can also sleep."""
    spins = 0
    while atomic_load(sync, cell) != value:
        spin_pause()
        spins += 1
        if spins >= SPINS_BEFORE_YIELD:
            sched_yield()
        if spins >= SPINS_BEFORE_YIELD + _YIELDS_BEFORE_SLEEP:
            return


_Task = tuple[int, Callable[..., None], tuple[Any, ...]]
_Outcome = tuple[int, BaseException | None]


class Team:
    """Threads that wait between steps. ``run`` is called from one thread at a time.

    Tasks and outcomes go through queues, which are the truth. Before a thread sleeps in one, it
    looks out for a while for a sign that there will be something: STARTED holds the number of the
    latest run, ENDED how many workers are through with it.

    The threads end with ``close``, with the team itself, or when the program ends.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sync: npt.NDArray[np.int64] = np.zeros(SYNC_CELLS, np.int64)
        self._tasks: list[SimpleQueue[_Task | None]] = []
        self._done: SimpleQueue[_Outcome] = SimpleQueue()
        self._runs = 0
        workers = []
        for thread in range(1, threads):
            tasks: SimpleQueue[_Task | None] = SimpleQueue()
            self._tasks.append(tasks)
            # No reference to the team itself, or it would live as long as its threads.
            arguments = (thread, threads, self.sync, tasks, self._done)
            workers.append(
                threading.Thread(target=_work, args=arguments, name=f"kernel-{thread}", daemon=True)
            )
            workers[-1].start()
        # Joined, not left to die: a thread that wakes while the interpreter goes away can take
        # the process down.
        self._end = weakref.finalize(self, _end_workers, self._tasks, workers)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call function(thread, threads, sync, *arguments) on every thread; wait for all."""
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
        _look_out(self.sync, ENDED, missing)
        while missing:
            run, outcome = self._done.get()
            # An interrupted run (Ctrl-C) leaves its outcomes behind; they are not this one's.
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
    sync: npt.NDArray[np.int64],
    tasks: "SimpleQueue[_Task | None]",
    done: "SimpleQueue[_Outcome]",
) -> None:
    """One thread's life: task after task until None comes."""
    run = 0
    while (task := tasks.get()) is not None:
        run, function, arguments = task
        outcome: BaseException | None = None
        try:
            function(thread, threads, sync, *arguments)
        except BaseException as failure:
            outcome = failure
        done.put((run, outcome))
        sync[ENDED] += 1  # should two threads collide here, the caller sleeps in the queue
        del task, function, arguments, outcome
        _look_out(sync, STARTED, run + 1)


def _end_workers(
    queues: "list[SimpleQueue[_Task | None]]", workers: list[threading.Thread]
) -> None:
    for tasks in queues:
        tasks.put(None)
    for worker in workers:
        worker.join()
