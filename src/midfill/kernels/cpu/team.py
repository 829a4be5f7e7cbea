"""A team of threads that run one compiled function together (SPMD).

A forward pass has hundreds of short parallel phases. Starting a parallel region for each costs
more than some of them last, so the team enters the compiled function once a step, and the
threads meet at barriers of a few hundred nanoseconds inside it.

``sync`` is an int64 array shared by the team; its cells lie on cache lines of their own.
"""

import os
import threading
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
from midfill.kernels.cpu.jit import kernel

ARRIVED, GENERATION, WORK = 0, 16, 32
SYNC_CELLS = 48
SPINS_BEFORE_YIELD = 4096


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
            # More threads than free cores: let the one we wait for run.
            sched_yield()


@kernel
def take_work(sync: Any, items: int) -> int:
    """Claim the next ``items`` work items of this phase; returns the first."""
    return atomic_add(sync, WORK, items)


def available_threads() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class Team:
    """Threads that wait between steps. ``run`` is called from one thread at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sync: npt.NDArray[np.int64] = np.zeros(SYNC_CELLS, np.int64)
        self._tasks: list[SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]] = []
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        for thread in range(1, threads):
            tasks: SimpleQueue[Any] = SimpleQueue()
            self._tasks.append(tasks)
            threading.Thread(
                target=self._work, args=(thread, tasks), name=f"kernel-{thread}", daemon=True
            ).start()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call function(thread, threads, sync, *arguments) on every thread; wait for all."""
        for tasks in self._tasks:
            tasks.put((function, arguments))
        function(0, self.threads, self.sync, *arguments)
        failures = [failure for _ in self._tasks if (failure := self._done.get()) is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads."""
        for tasks in self._tasks:
            tasks.put(None)

    def _work(self, thread: int, tasks: "SimpleQueue[Any]") -> None:
        while (task := tasks.get()) is not None:
            function, arguments = task
            try:
                function(thread, self.threads, self.sync, *arguments)
                self._done.put(None)
            except BaseException as failure:
                self._done.put(failure)
