"""Atomic integers and ways to wait: the building blocks of the thread pool's barriers."""

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.simd import I32, address, llvm_call


@generated(types.int64, OWN, INDEX, types.int64)
def atomic_add(context: Any, builder: Any, kinds: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to array[index] (int64) and return the value before."""
    pointer = address(context, builder, kinds[0], array, index)
    return builder.atomic_rmw("add", pointer, value, "acq_rel")


@generated(types.int64, OWN, INDEX)
def atomic_load(context: Any, builder: Any, kinds: Any, array: Any, index: Any) -> Any:
    """Return array[index] (int64), ordered after all that its writer did before."""
    pointer = address(context, builder, kinds[0], array, index)
    return builder.load_atomic(pointer, "acquire", 8)


@generated(types.void, OWN, INDEX, types.int64)
def atomic_store(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Set array[index] = value (int64), ordered after all that this thread did before."""
    array, index, value = arguments
    pointer = address(context, builder, kinds[0], array, index)
    builder.store_atomic(value, pointer, "release", 8)


@generated(types.boolean, OWN, INDEX, types.int64, types.int64)
def atomic_replace(context: Any, builder: Any, kinds: Any, *arguments: Any) -> Any:
    """Set array[index] = value (int64) if it is ``expected``; return whether it was."""
    array, index, expected, value = arguments
    pointer = address(context, builder, kinds[0], array, index)
    outcome = builder.cmpxchg(pointer, expected, value, "acq_rel", "acquire")
    return builder.extract_value(outcome, 1)


@generated(types.void)
def spin_pause(context: Any, builder: Any, kinds: Any) -> None:
    """Tell the core that this loop waits."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        llvm_call(builder, "llvm.x86.sse2.pause", [], ir.VoidType())
    elif machine in ("aarch64", "arm64"):
        llvm_call(builder, "llvm.aarch64.hint", [ir.Constant(I32, 1)], ir.VoidType())


_YIELD = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
sched_yield = types.ExternalFunction(_YIELD, types.int32())
"""Yield the core to another thread."""
