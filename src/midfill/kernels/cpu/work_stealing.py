"""How threads share a phase's items: contiguous shares, with stealing at the end.

Weights stream fastest from memory where one thread reads a long contiguous run. Between items that
are claimed one by one, an atomic operation ends the reading ahead, and neighbouring items on
different threads waste what the hardware prefetches. So each thread first takes a fixed part of
its own share, without asking. It claims half of the rest, half of what is left then, and so on, and
then what slower threads have left of theirs (guided self-scheduling: Polychronopoulos and Kuck,
IEEE Transactions on Computers C-36, 1987). A thread that was interrupted holds the others up for
its fixed part at most.

The phase must end with a barrier: claims are counted from one barrier to the next.
"""

from midfill.kernels.cpu.atomics import atomic_load, atomic_replace
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.memory import Int64Array
from midfill.kernels.cpu.standby import CLAIMS, WORKER_SLOTS
from midfill.kernels.cpu.thread_pool import GENERATION, ThreadContext

_FIXED_QUARTERS = 3
"""Quarters of a share that only its owner takes. Decoding on two Zen 4 cores lost a quarter of its
speed with none, 5% with two; with four, an interrupted thread keeps the others waiting."""
_ONE_PHASE = 1 << 32


@kernel
def next_run(context: ThreadContext, turn: int, items: int) -> tuple[int, int]:
    """Return the first item of this thread's next run and the end; (items, items) at the end.

    Args:
        context: this thread.
        turn: how many runs it has taken in this phase; threads take them in order, 0, 1, 2...
        items: of the phase, the same number on all threads.
    """
    threads, thread = context.threads, context.thread
    if threads == 1:
        return (0, items) if turn == 0 else (items, items)
    if turn == 0:
        first, end = items * thread // threads, items * (thread + 1) // threads
        fixed = (end - first) * _FIXED_QUARTERS // 4
        if fixed > 0:
            return first, first + fixed
    for step in range(threads):
        owner = (thread + step) % threads
        first, end = items * owner // threads, items * (owner + 1) // threads
        first += (end - first) * _FIXED_QUARTERS // 4
        claim, claimed = _claim(context.sync, owner, end - first)
        if claimed > 0:
            return first + claim, first + claim + claimed
    return items, items


@kernel
def _claim(sync: Int64Array, owner: int, count: int) -> tuple[int, int]:
    """Claim half of what is left of the last ``count`` items of a thread's share.

    A counter's upper half is the barrier's generation; one of an earlier phase counts from 0, so
    nobody has to reset it. The difference is right even after the generation's upper bits are lost.

    Returns:
        the first of them that is claimed, and how many are: 0 if none is left.
    """
    at = WORKER_SLOTS + 16 * owner + CLAIMS
    phase = atomic_load(sync, GENERATION) << 32
    while True:
        held = atomic_load(sync, at)
        claim = held - phase
        if claim < 0 or claim >= _ONE_PHASE:
            claim = 0
        if claim >= count:
            return count, 0
        half = (count - claim + 1) // 2
        if atomic_replace(sync, at, held, phase + claim + half):
            return claim, half
