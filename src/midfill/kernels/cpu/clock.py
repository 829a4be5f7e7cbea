"""Phase clock: how long each thread works in each phase of a step, and how long it waits.

Each thread owns a row of ``clock``, int64 [threads, 16]: the ticks of each phase, then the time of
its last reading. Reading the chip's counter takes about 10 ns, twice per phase, so the clock
always runs. A tick has no fixed length; see ``ticks_per_second``. On chips whose counter a program
may not read, all ticks stay 0.
"""

import platform
import time
from typing import Any

import numpy as np
from numba import types

from midfill.kernels.cpu.intrinsics import generated
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.memory import Int64Array
from midfill.kernels.cpu.simd import I64, llvm_call
from midfill.kernels.cpu.thread_pool import ThreadContext, barrier

PHASES = (
    "embed", "norm", "qkv", "rotate", "attention", "output", "gate_up", "down", "head", "wait",
)  # fmt: skip
"""What a thread does between two barriers, and waiting at a barrier."""

EMBED, NORM, QKV, ROTATE, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, WAIT = range(len(PHASES))
CLOCK_WIDTH = 16
"""Numbers per thread: two cache lines, so that no two threads write to the same line."""

_LAST_READING = len(PHASES)


@generated(types.int64)
def _ticks(context: Any, builder: Any, kinds: Any) -> Any:
    """Return the chip's counter."""
    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return I64(0)
    return llvm_call(builder, "llvm.readcyclecounter", [], I64)  # on ARM: the generic timer


@kernel
def start_clock(clock: Int64Array, thread: int) -> None:
    """Start a thread's clock: time before now counts for no phase."""
    clock[thread, _LAST_READING] = _ticks()


@kernel
def lap(clock: Int64Array, thread: int, phase: int) -> None:
    """Count the time since a thread's last reading for ``phase``."""
    now = _ticks()
    clock[thread, phase] += now - clock[thread, _LAST_READING]
    clock[thread, _LAST_READING] = now


@kernel
def end_phase(context: ThreadContext, phase: int) -> None:
    """Count the time since the last reading for ``phase``, then wait for all threads."""
    lap(context.clock, context.thread, phase)
    barrier(context.sync, context.threads)
    lap(context.clock, context.thread, WAIT)


def ticks_per_second() -> float:
    """Measure the counter for 20 ms; return nan where it can't be read."""
    clock = np.zeros((1, CLOCK_WIDTH), np.int64)
    start_clock(clock, 0)
    lap(clock, 0, WAIT)
    before, started = clock[0, WAIT], time.perf_counter()
    time.sleep(0.02)
    lap(clock, 0, WAIT)
    return float(clock[0, WAIT] - before) / (time.perf_counter() - started) or float("nan")
