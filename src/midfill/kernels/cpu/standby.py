"""Standby: between two runs of the same kernel, workers wait inside compiled code.

To start a kernel from Python, a thread needs the interpreter's lock, which the caller holds at that
moment, and it reports its end through Python again. Handing the lock over wakes a sleeping thread
twice per step, which can take longer than many of the step's phases. So a kernel may end with a
wait for its next run: the caller leaves a pointer to the arguments, and the workers that are
waiting take them from there. Whoever waits for long returns to Python and sleeps.

Such a kernel runs ``publish`` and ``start_workers`` on the calling thread, and on the others, again
and again, its work and ``await_run``; see decoder.py.
"""

import zlib
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.atomics import (
    atomic_load,
    atomic_replace,
    atomic_store,
    sched_yield,
    spin_pause,
)
from midfill.kernels.cpu.intrinsics import OWN, generated
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.memory import Int64Array
from midfill.kernels.cpu.simd import I64, address

SPINS_BEFORE_YIELD = 64
"""A few microseconds. A thread that spins for longer may hold the very core that the others wait
for; yielding a core that nobody else wants costs next to nothing."""
YIELDS_BEFORE_SLEEP = 3000
"""Some milliseconds, longer than a busy engine takes from one step to the next: a core that went
to sleep needs a good part of a millisecond to wake up."""

ARGUMENTS, RUN, REFUSED, RUNNING = 80, 81, 82, 83
"""Indices into the pool's ``sync``: the arguments' address, the run's number, whether the kernel
did nothing because waiting workers had come with arguments of other types, and how many threads
run it."""
WORKER_SLOTS = 96
"""Index from which on every thread has 16 integers of its own, at the following offsets."""
_STATE, _FINISHED, _SIGNATURE, CLAIMS = 0, 1, 2, 8
"""CLAIMS, on a cache line of its own, belongs to work_stealing.py."""

AWAY, WAITING, CLAIMED, GO, LEAVE = range(5)
"""States of a worker: not on standby; on standby; told to wait for ``GO``; started; told to return
to Python."""


def sync_size(threads: int) -> int:
    """Return the length of ``sync`` for that many threads."""
    return WORKER_SLOTS + 16 * threads


def _signature(value: Any) -> int:
    return zlib.crc32(str(value).encode())


@generated(types.void, OWN, OWN)
def publish(context: Any, builder: Any, kinds: Any, sync: Any, value: Any) -> None:
    """Leave a value for the workers; it lives until the calling function returns."""
    pointer = cgutils.alloca_once_value(builder, value)
    at = address(context, builder, kinds[0], sync, ir.Constant(I64, ARGUMENTS))
    builder.store_atomic(builder.ptrtoint(pointer, I64), at, "release", 8)


@generated(OWN, OWN, OWN)
def published(context: Any, builder: Any, kinds: Any, sync: Any, like: Any) -> Any:
    """Return what was published, which is of the type of ``like``."""
    at = address(context, builder, kinds[0], sync, ir.Constant(I64, ARGUMENTS))
    held = builder.load_atomic(at, "acquire", 8)
    return builder.load(builder.inttoptr(held, like.type.as_pointer()))


@generated(types.int64, OWN)
def signature_of(context: Any, builder: Any, kinds: Any, value: Any) -> Any:
    """Return a number that stands for a value's type."""
    return ir.Constant(I64, _signature(kinds[0]))


@kernel
def start_workers(sync: Int64Array, threads: int, signature: int) -> bool:
    """Start the claimed workers with what was published.

    Returns:
        False if one of them came with arguments of other types: then nothing was started, and the
        kernel must return at once.
    """
    for thread in range(1, threads):
        at = WORKER_SLOTS + 16 * thread
        claimed = atomic_load(sync, at + _STATE) == CLAIMED
        if claimed and atomic_load(sync, at + _SIGNATURE) != signature:
            atomic_store(sync, REFUSED, 1)
            return False
    for thread in range(1, threads):
        atomic_replace(sync, WORKER_SLOTS + 16 * thread + _STATE, CLAIMED, GO)
    return True


@kernel
def current_run(sync: Int64Array) -> int:
    """Return the number of the run that a worker has been started for."""
    return atomic_load(sync, RUN)


@kernel
def running_threads(sync: Int64Array) -> int:
    """Return how many threads take part in the current run."""
    return atomic_load(sync, RUNNING)


@kernel
def await_run(sync: Int64Array, thread: int, run: int, signature: int) -> bool:
    """Report the end of a run and wait for the next one; return whether that was started."""
    at = WORKER_SLOTS + 16 * thread
    atomic_store(sync, at + _SIGNATURE, signature)
    atomic_store(sync, at + _STATE, WAITING)
    atomic_store(sync, at + _FINISHED, run)
    spins = 0
    while True:
        state = atomic_load(sync, at + _STATE)
        if state in (GO, LEAVE):
            atomic_store(sync, at + _STATE, AWAY)
            return state == GO
        spin_pause()
        spins += 1
        if spins >= SPINS_BEFORE_YIELD:
            sched_yield()
        if spins >= SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP and atomic_replace(
            sync, at + _STATE, WAITING, AWAY
        ):
            return False


@entry_point
def set_waiting(sync: Int64Array, thread: int, state: int) -> bool:
    """Give a worker that is on standby another state; return whether it was."""
    return atomic_replace(sync, WORKER_SLOTS + 16 * thread + _STATE, WAITING, state)


@entry_point
def dismiss(sync: Int64Array, thread: int) -> bool:
    """Send a claimed worker back to Python; return whether it was claimed."""
    return atomic_replace(sync, WORKER_SLOTS + 16 * thread + _STATE, CLAIMED, LEAVE)


@entry_point
def await_workers(sync: Int64Array, threads: int, run: int) -> None:
    """Wait until all workers have finished a run, which they do at about the same time."""
    spins = 0
    for thread in range(1, threads):
        while atomic_load(sync, WORKER_SLOTS + 16 * thread + _FINISHED) != run:
            spin_pause()
            spins += 1
            if spins >= SPINS_BEFORE_YIELD:
                sched_yield()
