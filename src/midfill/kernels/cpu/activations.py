"""Activations: rows of float32, and the same rows quantised to int8 for quantised weights.

Each 32 consecutive floats are quantised together to one block of 48 bytes:

    bytes 0-31    32 int8 quants
    bytes 32-35   scale, float32
    bytes 36-39   scale * (sum of quants), float32
    bytes 40-43   -128 * (sum of quants), int32
    bytes 44-47   -128 * (sum of the first 16 quants), int32

So float k of an array belongs to block k // 32. Whoever writes a row quantises it.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.memory import Float32Array, Uint8Array
from midfill.kernels.cpu.simd import (
    F32,
    F32_VECTOR,
    I8,
    I32,
    I32_VECTOR,
    LANES,
    absolute,
    address,
    f32x16,
    integer,
    llvm_call,
    load,
    max_lanes,
    maximum,
    multiply,
    splat,
    store_unaligned,
)
from midfill.kernels.cpu.weight_formats import GROUP

ACTIVATION_BLOCK_BYTES = 48
SCALE, SCALED_SUM, OFFSET, HALF_OFFSET = 32, 36, 40, 44
"""Where in a block the four numbers that follow the quants start, in bytes."""
_STEPS = np.float32(127.0)


class Activations(NamedTuple):
    """Rows of activations, one after the other.

    Attributes:
        values: float32 [rows * width]; empty where only the blocks are read.
        quants: uint8 [rows * width / 32 * 48], the blocks of ``values``; empty where all of the
            model's weights are float32.
    """

    values: Float32Array
    quants: Uint8Array


@generated(f32x16, f32x16)
def _round(context: Any, builder: Any, kinds: Any, value: Any) -> Any:
    """Return the nearest whole number, ties to even, lane by lane."""
    return llvm_call(builder, "llvm.rint.v16f32", [value], F32_VECTOR)


@generated(types.void, OWN, INDEX, f32x16)
def _put_bytes(context: Any, builder: Any, kinds: Any, array: Any, offset: Any, value: Any) -> None:
    """Write whole numbers -128..127 as 16 int8 at byte ``offset`` of a uint8 array."""
    pointer = address(context, builder, kinds[0], array, offset)
    whole = builder.fptosi(value, I32_VECTOR)
    store_unaligned(builder, builder.trunc(whole, ir.VectorType(I8, LANES)), pointer)


def _sums_of_halves(builder: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Return the sums of two vectors, of whole numbers below 2^24: exact in any order.

    Both are added up in one vector, the first one in its lower half.
    """
    half = LANES // 2
    lower = [*range(half), *range(LANES, LANES + half)]
    upper = [lane + half for lane in lower]
    indices = (ir.Constant(I32_VECTOR, lanes) for lanes in (lower, upper))
    sums = builder.fadd(*(builder.shuffle_vector(low, high, lanes) for lanes in indices))
    for width in (4, 2, 1):
        order = ir.Constant(I32_VECTOR, [lane ^ width for lane in range(LANES)])
        sums = builder.fadd(sums, builder.shuffle_vector(sums, sums, order))
    first, second = (builder.extract_element(sums, I32(lane)) for lane in (0, half))
    return first, second


@generated(types.void, OWN, INDEX, types.float32, f32x16, f32x16)
def _put_sums(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Write the four numbers that follow the quants of the block at byte ``offset``.

    ``low`` and ``high`` are the quants, as float32.
    """
    array, offset, scale, low, high = arguments
    pointer = address(context, builder, kinds[0], array, offset)
    first, second = _sums_of_halves(builder, low, high)
    total = builder.fadd(first, second)

    def biased(value: Any) -> Any:
        return builder.fptosi(builder.fmul(value, F32(-128.0)), I32)

    for at, value in (
        (SCALE, scale),
        (SCALED_SUM, builder.fmul(scale, total)),
        (OFFSET, biased(total)),
        (HALF_OFFSET, biased(first)),
    ):
        store_unaligned(builder, value, builder.gep(pointer, [integer(at)]))


@kernel
def block_at(element: int) -> int:
    """Return the byte at which the block of the 32 floats that start at ``element`` lies."""
    return element // GROUP * ACTIVATION_BLOCK_BYTES


@inlined_kernel
def quantize(rows: Activations, at: int, size: int) -> None:
    """Quantise values[at:at + size] into their blocks, if the model needs them."""
    if len(rows.quants) > 0:
        quantize_row(rows.values, at, size, rows.quants, block_at(at))


@inlined_kernel
def quantize_row(x: Float32Array, x_at: int, size: int, blocks: Uint8Array, at: int) -> None:
    """Quantise x[x_at:x_at + size], a multiple of 32 floats, to blocks from byte ``at`` on."""
    for group in range(size // GROUP):
        element = x_at + group * GROUP
        low, high = load(x, element), load(x, element + LANES)
        span = max_lanes(maximum(absolute(low), absolute(high)))
        factor = splat(_STEPS / span if span > np.float32(0.0) else np.float32(0.0))
        low, high = _round(multiply(low, factor)), _round(multiply(high, factor))
        block = at + group * ACTIVATION_BLOCK_BYTES
        _put_bytes(blocks, block, low)
        _put_bytes(blocks, block + LANES, high)
        _put_sums(blocks, block, span / _STEPS, low, high)
