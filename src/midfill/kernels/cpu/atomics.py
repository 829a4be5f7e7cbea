"""Atomic integers and ways to wait: the building blocks of the thread pool's barriers."""

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from midfill.kernels.cpu.simd import I32, Codegen, address, llvm_call


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(typing_context: Any, array: Any, index: Any, value: Any) -> tuple[Any, Codegen]:
    """Add to array[index] (int64) and return the value before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.atomic_rmw("add", pointer, arguments[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typing_context: Any, array: Any, index: Any) -> tuple[Any, Codegen]:
    """Return array[index] (int64), ordered after all that its writer did before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_store(typing_context: Any, array: Any, index: Any, value: Any) -> tuple[Any, Codegen]:
    """Set array[index] = value (int64), ordered after all that this thread did before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store_atomic(arguments[2], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_replace(
    typing_context: Any, array: Any, index: Any, expected: Any, value: Any
) -> tuple[Any, Codegen]:
    """Set array[index] = value (int64) if it is ``expected``; return whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, expected, value = arguments
        pointer = address(context, builder, signature.args[0], array, index)
        outcome = builder.cmpxchg(pointer, expected, value, "acq_rel", "acquire")
        return builder.extract_value(outcome, 1)

    return types.boolean(array, types.intp, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def spin_pause(typing_context: Any) -> tuple[Any, Codegen]:
    """Tell the core that this loop waits."""
    machine = platform.machine()

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if machine in ("x86_64", "AMD64"):
            llvm_call(builder, "llvm.x86.sse2.pause", [], ir.VoidType())
        elif machine in ("aarch64", "arm64"):
            llvm_call(builder, "llvm.aarch64.hint", [ir.Constant(I32, 1)], ir.VoidType())
        return context.get_dummy_value()

    return types.void(), codegen


sched_yield = types.ExternalFunction("sched_yield", types.int32())
"""Yield the core to another thread (POSIX)."""
