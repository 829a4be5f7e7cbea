"""Activations: rows of float32, and the same rows quantised to int8 for quantised weights.

Each 32 consecutive floats are quantised together to one block of 48 bytes:

    bytes 0-31    32 int8 quants
    bytes 32-35   scale, float32
    bytes 36-39   scale * (sum of quants), float32
    bytes 40-43   -128 * (sum of quants), int32
    bytes 44-47   -128 * (sum of the first 16 quants), int32

So float k of an array belongs to block k // 32. Whoever writes a row quantises it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.memory import Float32Array, Uint8Array
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I8,
    I32,
    I32_VECTOR,
    LANES,
    address,
    constant,
    integer,
    integers,
    larger,
    llvm_call,
    load_unaligned,
    store_unaligned,
)
from midfill.kernels.cpu.weight_formats import GROUP

ACTIVATION_BLOCK_BYTES = 48
SCALE, SCALED_SUM, OFFSET, HALF_OFFSET = 32, 36, 40, 44
"""Where in a block the four numbers that follow the quants start, in bytes."""
_STEPS = 127.0
_NEARLY_ZERO = 2.0**-120
"""Groups without larger values are zeros: 127 divided by less is no number."""
_TOGETHER = 4
"""Groups that are quantised together: each has four neighbouring lanes of a vector."""
_ROUND = 12582912.0
"""1.5 * 2^23. Added to a float of at most 2^22, it rounds it to a whole number, ties to even, and
leaves that in the lowest bits."""
_ROUND_BITS = 0x4B400000
"""The same number as int32."""

_Pair = tuple[Any, Any]
"""Two vectors; of a group: inputs 0-15 and 16-31."""


class Activations(NamedTuple):
    """Rows of activations, one after the other.

    Attributes:
        values: float32 [rows * width]; empty where only the blocks are read.
        quants: uint8 [rows * width / 32 * 48], the blocks of ``values``; empty where all of the
            model's weights are float32.
    """

    values: Float32Array
    quants: Uint8Array


def _shuffled(builder: Any, pair: _Pair, lanes: Sequence[int]) -> Any:
    """Return some lanes of two vectors; the second one's are counted from 16 on."""
    order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(*pair, order)


def _combined(
    builder: Any, pair: _Pair, lanes: list[int], distance: int, combine: Callable[..., Any]
) -> Any:
    """Combine some lanes of two vectors with the lanes that are so many further."""
    further = [lane + distance for lane in lanes]
    return combine(_shuffled(builder, pair, lanes), _shuffled(builder, pair, further))


_EIGHTS = [*range(8), *range(16, 24)]
"""Lanes that, combined with those 8 further, leave eight lanes of each of two vectors."""
_FOURS = [first + lane for first in (0, 8, 16, 24) for lane in range(4)]
"""Lanes that, combined with those 4 further, leave four lanes of each half of two vectors."""


def _largest(builder: Any, groups: list[_Pair]) -> Any:
    """Return each group's largest absolute value, in all of its four lanes."""

    def absolute(value: Any) -> Any:
        return llvm_call(builder, "llvm.fabs.v16f32", [value], F32_VECTOR)

    larger_of = partial(larger, builder)
    whole = [larger_of(absolute(low), absolute(high)) for low, high in groups]
    pairs = [_combined(builder, (whole[i], whole[i + 1]), _EIGHTS, 8, larger_of) for i in (0, 2)]
    largest = _combined(builder, (pairs[0], pairs[1]), _FOURS, 4, larger_of)
    for width in (2, 1):
        lanes = [lane ^ width for lane in range(LANES)]
        largest = larger_of(largest, _shuffled(builder, (largest, largest), lanes))
    return largest


def _sums(builder: Any, quants: list[_Pair]) -> Any:
    """Return sums of each group's quants, in its four lanes: all, all, all, the first half.

    Args:
        builder: of the code.
        quants: int32, added to ``_ROUND_BITS``. Sums are exact, modulo 2^32.
    """
    add = builder.add
    halves = [_combined(builder, pair, _EIGHTS, 8, add) for pair in quants]
    low, high = (_combined(builder, (halves[i], halves[i + 1]), _FOURS, 4, add) for i in (0, 2))
    first = _shuffled(builder, (low, high), _FOURS)
    both = _combined(builder, (low, high), _FOURS, 4, add)
    mixed = [lane // 4 * 4 + lane % 4 // 2 + lane % 2 * LANES for lane in range(LANES)]
    sums = _combined(builder, (both, first), mixed, 2, add)  # twice all, the first half
    lanes = [lane // 4 * 4 + lane % 4 // 3 for lane in range(LANES)]
    sums = _combined(builder, (sums, sums), lanes, 2, add)
    counts = [GROUP, GROUP, GROUP, GROUP // 2] * _TOGETHER
    added = ir.Constant(I32_VECTOR, [count * _ROUND_BITS % 2**32 for count in counts])
    return builder.sub(sums, added)


def _quantized(builder: Any, groups: list[_Pair]) -> tuple[list[_Pair], Any]:
    """Return the quants of four groups, added to ``_ROUND_BITS``, and what follows them.

    Returns:
        int32 vectors of each group; and the last four numbers of the four blocks.
    """
    largest, steps = _largest(builder, groups), constant(_STEPS)
    has_any = builder.fcmp_ordered(">", largest, constant(_NEARLY_ZERO))
    factors = builder.select(has_any, builder.fdiv(steps, largest), constant(0.0))
    quants = []
    for i, halves in enumerate(groups):
        factor = _shuffled(builder, (factors, factors), [4 * i] * LANES)
        scaled = (builder.fmul(half, factor) for half in halves)
        rounded = (builder.fadd(each, constant(_ROUND)) for each in scaled)
        low, high = (builder.bitcast(each, I32_VECTOR) for each in rounded)
        quants.append((low, high))
    sums = _sums(builder, quants)
    scales = builder.fdiv(largest, steps)
    scaled_sums = builder.fmul(builder.sitofp(sums, F32_VECTOR), scales)
    offsets = builder.shl(builder.sub(integers(0), sums), integers(7))
    scales, scaled_sums = (builder.bitcast(each, I32_VECTOR) for each in (scales, scaled_sums))
    second, last = (
        [lane + LANES * (lane % 4 in places) for lane in range(LANES)] for places in ((1,), (2, 3))
    )
    floats = _shuffled(builder, (scales, scaled_sums), second)
    return quants, _shuffled(builder, (floats, offsets), last)


def _quantizer(count: int) -> Any:
    """Generate the quantisation of one group, or of as many as are quantised together."""

    @generated(types.void, OWN, INDEX, INDEX, OWN, INDEX, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Quantise some groups; see ``quantize_groups``."""
        x, x_at, x_step, blocks, at, step = arguments
        source = address(context, builder, kinds[0], x, x_at)
        target = address(context, builder, kinds[3], blocks, at)
        groups = []
        for i in range(_TOGETHER):  # one group is all four of them, which LLVM computes once
            start = builder.gep(source, [builder.mul(integer(i % count), x_step)])
            halves = (builder.gep(start, [integer(lane)]) for lane in (0, LANES))
            low, high = (load_unaligned(builder, half, F32_VECTOR) for half in halves)
            groups.append((low, high))
        quants, tails = _quantized(builder, groups)
        for i in range(count):
            block = builder.gep(target, [builder.mul(integer(i), step)])
            for half, place in zip(quants[i], (0, LANES), strict=True):
                small = builder.trunc(half, ir.VectorType(I8, LANES))
                store_unaligned(builder, small, builder.gep(block, [integer(place)]))
            tail = _shuffled(builder, (tails, tails), range(4 * i, 4 * i + 4))
            store_unaligned(builder, tail, builder.gep(block, [integer(SCALE)]))

    return operation


_quantize_one, _quantize_four = (_quantizer(count) for count in (1, _TOGETHER))


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
    quantize_groups(x, x_at, GROUP, size // GROUP, blocks, at, ACTIVATION_BLOCK_BYTES)


@inlined_kernel
def quantize_groups(
    x: Float32Array, x_at: int, x_step: int, count: int, blocks: Uint8Array, at: int, step: int
) -> None:
    """Quantise groups of 32 floats, ``x_step`` floats apart, to blocks ``step`` bytes apart."""
    together = count - count % _TOGETHER
    for group in range(0, together, _TOGETHER):
        _quantize_four(x, x_at + group * x_step, x_step, blocks, at + group * step, step)
    for group in range(together, count):
        _quantize_one(x, x_at + group * x_step, x_step, blocks, at + group * step, step)
