"""Code that reads blocks of packed weights: their quants, scales and minima, and prefetches.

weight_formats.py says where they lie. Generators of products share these functions.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from midfill.kernels.cpu.halves import load_halves
from midfill.kernels.cpu.memory import LINE
from midfill.kernels.cpu.neon import has_dot_products
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I8,
    I32,
    I32_VECTOR,
    LANES,
    constant,
    has_feature,
    integer,
    integers,
    llvm_call,
    load_unaligned,
)
from midfill.kernels.cpu.tiles import Prefetch
from midfill.kernels.cpu.weight_formats import GROUP, PANEL, BlockLayout

VECTORS = PANEL // LANES
"""Vectors that hold a number per output of a panel."""

_FIRST_TILE_DISTANCE = 6144
"""How many bytes ahead of where it reads a panel's first tile prefetches."""


def fetched_bytes(layout: BlockLayout) -> int:
    """Return the bytes prefetched per group: a third of its own, in whole cache lines."""
    return -(-layout.block_bytes // layout.groups // (3 * LINE)) * LINE


def load_as(builder: ir.IRBuilder, pointer: Any, at: Any, kind: Any) -> Any:
    """Load a value of some type from byte ``at`` behind a pointer, whatever its alignment."""
    value = builder.load(builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer()))
    value.align = 1
    return value


def weights_of_fours(
    builder: ir.IRBuilder, layout: BlockLayout, quants: Any, first: Any, fours: int
) -> list[Any]:
    """Return the quants of some fours of inputs: two vectors each, for outputs 0-15 and 16-31.

    In a vector, each output has a 32-bit lane, and each input a byte of it.

    Args:
        quants: of the group.
        first: number of the first four in the group.
        fours: as many as share bytes in a plane, or a multiple of that.
    """
    count = fours * VECTORS
    weights: list[Any] = [None] * count
    plane_at = position = 0
    for bits in layout.planes:
        shared = 8 // bits
        offset = builder.mul(first, integer(VECTORS * LINE // shared))
        plane = builder.gep(quants, [builder.add(integer(plane_at), offset)])
        for w in range(count):
            if w % shared == 0:
                at = builder.gep(plane, [integer(w // shared * LINE)])
                packed = load_unaligned(builder, at, I32_VECTOR)
            part = _bits(builder, packed, w % shared * bits, position, bits)
            weights[w] = part if weights[w] is None else builder.or_(weights[w], part)
        plane_at += GROUP * PANEL * bits // 8
        position += bits
    return weights


def _bits(builder: ir.IRBuilder, packed: Any, at: int, to: int, bits: int) -> Any:
    """Return some bits of every byte, moved from bit ``at`` to bit ``to``."""
    if bits == 8:
        return packed
    shift = integers(abs(at - to))
    if at > to:
        packed = builder.lshr(packed, shift)
    elif at < to:
        packed = builder.shl(packed, shift)
    return builder.and_(packed, integers(((1 << bits) - 1 << to) * 0x01010101))


def _fetch(builder: ir.IRBuilder, pointer: Any, lines: int, level: int) -> None:
    """Prefetch cache lines into the first-level or second-level cache."""
    for line in range(lines):
        at = builder.gep(pointer, [integer(line * LINE)])
        hints = [I32(hint) for hint in (0, 4 - level, 1)]  # read, which level, data
        llvm_call(builder, "llvm.prefetch.p0", [at, *hints], ir.VoidType())


def fetch_ahead(builder: ir.IRBuilder, layout: BlockLayout, group: Any, ahead: Any) -> None:
    """Prefetch a group's share of what is read next.

    Args:
        builder: where to.
        layout: of the panel's format.
        group: where the group starts.
        ahead: see ``dots.quantized_product``.
    """
    is_first = builder.icmp_signed("<=", ahead, integer(0))
    with builder.if_else(is_first, likely=True) as (first, later):
        with first:
            _fetch_next_groups(builder, layout, group, ahead)
        with later:
            at = builder.gep(group, [ahead])
            _fetch(builder, at, fetched_bytes(layout) // LINE, level=2)


def _fetch_next_groups(builder: ir.IRBuilder, layout: BlockLayout, group: Any, ahead: Any) -> None:
    """Prefetch a group's number of bytes from where a first tile will read soon, if it is to.

    Lines of two planes are read in turn, and those of one plane with work in between, which some
    chips foresee badly. Whole bytes are read fast enough everywhere.
    """
    if layout.bits == 8:
        return
    lines = -(-layout.block_bytes // layout.groups // LINE)
    for prefetch, level in ((Prefetch.L1, 1), (Prefetch.L2, 2)):
        with builder.if_then(builder.icmp_signed("==", ahead, integer(-prefetch))):
            at = builder.gep(group, [integer(_FIRST_TILE_DISTANCE)])
            _fetch(builder, at, lines, level)


def load_factor(
    context: Any, builder: ir.IRBuilder, layout: BlockLayout, block: Any, group: Any, half: int,
    whole: int, v: int,
) -> Any:  # fmt: skip
    """Return 16 scales or minima.

    Args:
        context, builder: of the code.
        layout: of the panel's format.
        block, group: where they are.
        half: number of the block's 32 float16 that are used.
        whole: number of the group's 32 int8 that are used, where it has any.
        v: which 16 outputs.
    """
    if layout.has_exponents:
        return _load_powers(builder, block, v)
    at = integer((half * PANEL + v * LANES) * 2)
    factor = load_halves(context, builder, builder.gep(block, [at]))
    if not layout.scales:
        return factor
    at = integer(whole * PANEL + v * LANES)
    integers_of_group = load_as(builder, group, at, ir.VectorType(I8, LANES))
    widened = builder.sext(integers_of_group, I32_VECTOR)
    return builder.fmul(factor, builder.sitofp(widened, F32_VECTOR))


def _load_powers(builder: ir.IRBuilder, block: Any, v: int) -> Any:
    """Return 16 scales 2 ** (e - 128), 0 where e is 0.

    A float32 with the exponent bits e is 2 ** (e - 127), and half of it exact.
    """
    exponents = load_as(builder, block, integer(v * LANES), ir.VectorType(I8, LANES))
    bits = builder.shl(builder.zext(exponents, I32_VECTOR), integers(23))
    return builder.fmul(builder.bitcast(bits, F32_VECTOR), constant(0.5))


def look_up(context: Any, builder: ir.IRBuilder, table: Sequence[int], codes: Any) -> Any:
    """Return the entries of a table of 16 bytes that each byte of a vector is the number of."""
    kind = ir.VectorType(I8, LINE)
    numbers = builder.bitcast(codes, kind)
    for feature, lanes, name in _TABLE_LOOKUPS:
        if has_feature(context, feature):
            return builder.bitcast(_shuffled(builder, name, table, numbers, lanes), codes.type)
    if has_dot_products(context):
        name = "llvm.aarch64.neon.tbl1.v16i8"
        return builder.bitcast(_shuffled(builder, name, table, numbers, len(table)), codes.type)
    found = ir.Constant(kind, [table[0]] * LINE)
    for number, entry in enumerate(table):
        is_number = builder.icmp_signed("==", numbers, ir.Constant(kind, [number] * LINE))
        found = builder.select(is_number, ir.Constant(kind, [entry] * LINE), found)
    return builder.bitcast(found, codes.type)


_TABLE_LOOKUPS = (
    ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
    ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
)
"""Feature of the chip, bytes, and the operation that looks each of them up in its 16 bytes."""


def _shuffled(
    builder: ir.IRBuilder, name: str, table: Sequence[int], numbers: Any, lanes: int
) -> Any:
    """Look bytes up by an operation on so many of them at a time."""
    part = ir.VectorType(I8, lanes)
    entries = ir.Constant(part, list(table) * (lanes // len(table)))
    parts = []
    for first in range(0, LINE, lanes):
        order = ir.Constant(ir.VectorType(I32, lanes), list(range(first, first + lanes)))
        some = builder.shuffle_vector(numbers, numbers, order)
        parts.append(llvm_call(builder, name, [entries, some], part))
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, size), list(range(size)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(low, high, order) for low, high in pairs]
    return parts[0]
