"""A pool of threads that run one compiled function together (SPMD).

A forward pass has hundreds of short parallel phases. Starting a parallel region for each would
take longer than some of them last. So the pool enters the compiled function once per step, and
its threads meet inside at barriers of a few hundred nanoseconds.

The threads share ``sync``, int64: counters at the indices below, each on its own cache lines, and
what standby.py keeps there.
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
from midfill.kernels.cpu.standby import (
    CLAIMED,
    LEAVE,
    REFUSED,
    RUN,
    RUNNING,
    SPINS_BEFORE_YIELD,
    YIELDS_BEFORE_SLEEP,
    await_workers,
    dismiss,
    set_waiting,
    sync_size,
)

ARRIVED, GENERATION, WORK, STARTED, ENDED = 0, 16, 32, 48, 64


class ThreadContext(NamedTuple):
    """One thread's view of a step.

    Attributes:
        thread: this thread's index, 0 <= thread < threads.
        threads: threads that run the step.
        sync: int64, shared; see the module.
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
        if spins >= SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP:
            return


_Task = tuple[int, Callable[..., None], tuple[Any, ...], bool]
"""The run's number, what to call with which arguments, and whether its end is reported there."""
_Outcome = tuple[int, BaseException | None]


class ThreadPool:
    """Threads that wait between steps; call ``run`` from one thread at a time.

    Tasks and outcomes are passed through queues. Before a thread sleeps in one, it spins for a
    while on a counter: STARTED holds the number of the latest run, ENDED the number of workers
    that have finished it.

    The threads end with ``close``, when the pool is garbage-collected, or with the program.

    Attributes:
        threads: threads that run a function, the calling one included.
        running: how many of them run kernels on standby, 1 <= running <= threads.
        sync: int64 [sync_size(threads)], the counters they share.
    """

    def __init__(self, threads: int) -> None:
        self.threads = self.running = threads
        self.sync: Int64Array = np.zeros(sync_size(threads), np.int64)
        self._tasks: list[SimpleQueue[_Task | None]] = []
        self._done: SimpleQueue[_Outcome] = SimpleQueue()
        self._runs = 0
        self._workers: list[threading.Thread] = []
        for thread in range(1, threads):
            tasks: SimpleQueue[_Task | None] = SimpleQueue()
            self._tasks.append(tasks)
            # No reference to the pool itself, or it would live as long as its threads.
            arguments = (thread, threads, self.sync, tasks, self._done)
            self._workers.append(
                threading.Thread(target=_work, args=arguments, name=f"kernel-{thread}", daemon=True)
            )
            self._workers[-1].start()
        # Joined at exit: a thread that wakes up during interpreter shutdown can crash the process.
        self._end = weakref.finalize(self, _end_workers, self.sync, self._tasks, self._workers)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call function(thread, threads, sync, *arguments) on every thread and wait for all.

        Raises:
            BaseException: the first failure of any thread.
        """
        self._runs += 1
        self.sync[ENDED] = 0
        for thread, tasks in enumerate(self._tasks, 1):
            set_waiting(self.sync, thread, LEAVE)
            tasks.put((self._runs, function, arguments, False))
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

    def run_on_standby(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a kernel that waits for its next run in compiled code, see standby.py.

        Such a kernel raises nothing once it is compiled for its arguments. It runs on the first
        ``running`` threads.
        """
        self._runs += 1
        run, threads = self._runs, self.running
        workers = range(1, threads)
        self.sync[RUN] = run
        self.sync[RUNNING] = threads
        self.sync[REFUSED] = 0
        task = (run, function, arguments, True)
        for thread in workers:
            if not set_waiting(self.sync, thread, CLAIMED):
                self._tasks[thread - 1].put(task)
        self.sync[STARTED] = run
        function(0, threads, self.sync, *arguments)
        if self.sync[REFUSED]:
            for thread in workers:
                if dismiss(self.sync, thread):
                    self._tasks[thread - 1].put(task)
            function(0, threads, self.sync, *arguments)
        await_workers(self.sync, threads, run)

    def thread_ids(self) -> list[int]:
        """Return the system's ids of the calling thread and of the workers, in their order."""
        ids = (worker.native_id for worker in self._workers)
        return [threading.get_native_id(), *(number for number in ids if number is not None)]

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
        run, function, arguments, on_standby = task
        outcome: BaseException | None = None
        try:
            function(thread, threads, sync, *arguments)
        except BaseException as failure:
            outcome = failure
        if not on_standby:
            done.put((run, outcome))
            sync[ENDED] += 1  # if two threads collide here, the caller sleeps in the queue
        del task, function, arguments, outcome
        if not on_standby:
            _spin_until(sync, STARTED, run + 1)


def _end_workers(
    sync: Int64Array, queues: "list[SimpleQueue[_Task | None]]", workers: list[threading.Thread]
) -> None:
    for thread, tasks in enumerate(queues, 1):
        set_waiting(sync, thread, LEAVE)
        tasks.put(None)
    for worker in workers:
        worker.join()
