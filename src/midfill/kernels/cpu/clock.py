"""Phase clock: how long each thread works in each phase of a step, and how long it waits.

Every thread owns one row of an int64 array: a cell a phase, and the time of its last reading.
Reading the chip's counter takes some 10 ns, twice a phase, so the clock always runs. Ticks are of
no fixed length; only their shares mean anything. On chips whose counter a program may not read
all cells stay 0.
"""

import platform
import time
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.simd import I64, Codegen, llvm_call
from midfill.kernels.cpu.team import barrier

PHASES = (
    "embed", "norm", "qkv", "rotate", "attention", "output", "gate_up", "down", "head", "wait",
)  # fmt: skip
"""What a thread does between two barriers, and waiting at them."""

EMBED, NORM, QKV, ROTATE, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, WAIT = range(len(PHASES))
CLOCK_CELLS = 16
"""Cells a thread: two cache lines, so that no two threads write to the same one."""

_LAST_READING = len(PHASES)


@intrinsic  # type: ignore[untyped-decorator]
def _ticks(typing_context: Any) -> tuple[Any, Codegen]:
    """The chip's counter."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return I64(0)
        return llvm_call(builder, "llvm.readcyclecounter", [], I64)

    return types.int64(), codegen


@kernel
def start_clock(clock: Any, thread: int) -> None:
    """What happened before now counts for nothing."""
    clock[thread, _LAST_READING] = _ticks()


@kernel
def lap(clock: Any, thread: int, phase: int) -> None:
    """What this thread did since its last reading was ``phase``."""
    now = _ticks()
    clock[thread, phase] += now - clock[thread, _LAST_READING]
    clock[thread, _LAST_READING] = now


@kernel
def end_phase(thread: int, threads: int, sync: Any, clock: Any, phase: int) -> None:
    """A barrier; what was done since the last reading was ``phase``."""
    lap(clock, thread, phase)
    barrier(sync, threads)
    lap(clock, thread, WAIT)


def ticks_per_second() -> float:
    """How long a tick is; measures for 20 ms. nan where the counter can't be read."""
    clock = np.zeros((1, CLOCK_CELLS), np.int64)
    start_clock(clock, 0)
    lap(clock, 0, WAIT)
    before, started = clock[0, WAIT], time.perf_counter()
    time.sleep(0.02)
    lap(clock, 0, WAIT)
    return float(clock[0, WAIT] - before) / (time.perf_counter() - started) or float("nan")
