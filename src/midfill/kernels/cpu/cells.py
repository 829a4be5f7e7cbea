"""KV cells: the K or V of one token and one KV head, in the precision the pool is kept in.

Cells of a layer and head lie side by side in slot order, so the KV of consecutive slots is one
stream of memory: [layers, kv_heads, slots, head_dim]. The type of the array tells the format:

    float32   as computed
    uint16    float16, rounded to nearest; what is too large for it is stored as +-65504
    int8      codes -127..127 of the cell's own scale, float32 [layers, kv_heads, slots]

A cell is rounded once, when it is written. Every reader, also of the same step, sees the rounded
values, so answers do not depend on how a prompt was cut.
"""

from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from midfill.kernels.cpu.halves import load_halves, store_halves
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.memory import untouched
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I8,
    I32_VECTOR,
    LANES,
    Codegen,
    absolute,
    address,
    f32x16,
    llvm_call,
    load,
    load_unaligned,
    max_lanes,
    maximum,
    multiply,
    splat,
    store_unaligned,
)

I8_VECTOR = ir.VectorType(I8, LANES)
_STEPS = np.float32(127.0)


class CellFormat(StrEnum):
    """How a KV pool keeps its numbers."""

    F32 = "f32"
    F16 = "f16"
    I8 = "i8"


_DTYPES: dict[CellFormat, Any] = {
    CellFormat.F32: np.float32,
    CellFormat.F16: np.uint16,
    CellFormat.I8: np.int8,
}


def cell_bytes(cell_format: CellFormat, head_dim: int) -> int:
    """Bytes of one cell, its scale included."""
    scale = 4 if cell_format is CellFormat.I8 else 0
    return head_dim * np.dtype(_DTYPES[cell_format]).itemsize + scale


def allocate_cells(
    cell_format: CellFormat, cells: int, head_dim: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.float32]]:
    """Zeroed memory: values [cells * head_dim] and scales [cells], or [0] where there are none."""
    scales = cells if cell_format is CellFormat.I8 else 0
    values = untouched(cells * head_dim, _DTYPES[cell_format])
    return values, untouched(scales, np.float32).view(np.float32)


def load_cell_vector(context: Any, builder: ir.IRBuilder, array_type: Any, pointer: Any) -> Any:
    """16 numbers of a cell as float32; codes without their scale."""
    if array_type.dtype == types.float32:
        return load_unaligned(builder, pointer, F32_VECTOR)
    if array_type.dtype == types.uint16:
        return load_halves(context, builder, pointer)
    codes = builder.sext(load_unaligned(builder, pointer, I8_VECTOR), I32_VECTOR)
    return builder.sitofp(codes, F32_VECTOR)


@intrinsic  # type: ignore[untyped-decorator]
def is_coded(typing_context: Any, cells: Any) -> tuple[Any, Codegen]:
    """Whether cells hold codes that go with a scale; known when the kernel is compiled."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.boolean, signature.args[0].dtype == types.int8)

    return types.boolean(cells), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load_cell(typing_context: Any, cells: Any, offset: Any) -> tuple[Any, Codegen]:
    """Lanes 0..15 from cells[offset:offset + 16], as float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, signature.args[0], arguments[0], arguments[1])
        return load_cell_vector(context, builder, signature.args[0], pointer)

    return f32x16(cells, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_cell(typing_context: Any, cells: Any, offset: Any, value: Any) -> tuple[Any, Codegen]:
    """cells[offset:offset + 16] = value, rounded to the nearest the cells can hold."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        pointer = address(context, builder, kind, arguments[0], arguments[1])
        value = arguments[2]
        if kind.dtype == types.float32:
            store_unaligned(builder, value, pointer)
        elif kind.dtype == types.uint16:
            store_halves(context, builder, value, pointer)
        else:
            whole = llvm_call(builder, "llvm.rint.v16f32", [value], F32_VECTOR)
            codes = builder.trunc(builder.fptosi(whole, I32_VECTOR), I8_VECTOR)
            store_unaligned(builder, codes, pointer)
        return context.get_dummy_value()

    return types.void(cells, types.intp, f32x16), codegen


@kernel
def write_cell(
    x: Any, x_at: int, head_dim: int, cells: Any, scales: Any, head_at: int, slot: int
) -> None:
    """Round x[x_at:x_at + head_dim] into a cell. head_at: cells before this layer and head."""
    cell = head_at + slot
    at = cell * head_dim
    if not is_coded(cells):
        for d in range(0, head_dim, LANES):
            store_cell(cells, at + d, load(x, x_at + d))
        return
    largest = splat(np.float32(0.0))
    for d in range(0, head_dim, LANES):
        largest = maximum(largest, absolute(load(x, x_at + d)))
    span = max_lanes(largest)
    scales[cell] = span / _STEPS
    factor = splat(_STEPS / span if span > np.float32(0.0) else np.float32(0.0))
    for d in range(0, head_dim, LANES):
        store_cell(cells, at + d, multiply(load(x, x_at + d), factor))
