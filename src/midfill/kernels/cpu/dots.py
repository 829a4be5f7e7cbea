"""Integer products: rows of int8 codes times panels of 4- or 8-bit codes.

A row of activations is rounded to int8 in groups of 32 inputs, each with its own scale (see
``round_row``). Products of codes are summed as integers, which is exact, and each group's sum is
scaled and added to the row's, from the first group to the last. So a row's result is the same bit
for bit whatever other rows a call does, and on every chip, whichever instruction sums the products:
vpdpbusd (VNNI), vpmaddubsw and vpmaddwd (AVX-512BW, AVX2), or plain integer arithmetic.

An activation block, 48 bytes: 32 int8 codes, then scale, scale * (sum of codes) (both float32) and
-128 * (sum of codes) (int32), 4 bytes unused.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from midfill.kernels.cpu.halves import load_halves
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.packing import GROUP, HEADER_BYTES, PANEL, WeightFormat, block_bytes
from midfill.kernels.cpu.simd import (
    F32,
    F32_VECTOR,
    I8,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Codegen,
    absolute,
    add,
    address,
    broadcast,
    constant,
    f32x16,
    fused_multiply_add,
    has_feature,
    integer,
    integers,
    llvm_call,
    load,
    load_unaligned,
    max_lanes,
    maximum,
    multiply,
    splat,
    store_unaligned,
    sum_lanes,
)

ROUNDED_BYTES = 48
_SCALE, _SCALED_SUM, _OFFSET = 32, 36, 40
_VECTORS = PANEL // LANES
_BYTES = ir.VectorType(I8, 4 * LANES)
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_STEPS = np.float32(127.0)
_LINE = 64
_FETCHED_LINES = {WeightFormat.Q4: 4, WeightFormat.Q8: 6}
Q4_FETCHED, Q8_FETCHED = (lines * _LINE for lines in _FETCHED_LINES.values())
"""Bytes of a block that a product fetches elsewhere for each of its own: a third, rounded up."""


def _halved(builder: ir.IRBuilder, vector: Any) -> list[Any]:
    """A vector's lower and upper half."""
    size = vector.type.count // 2
    index = ir.VectorType(I32, size)
    return [
        builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(at, at + size))))
        for at in (0, size)
    ]


def _joined(builder: ir.IRBuilder, halves: list[Any]) -> Any:
    size = halves[0].type.count * 2
    order = ir.Constant(ir.VectorType(I32, size), list(range(size)))
    return builder.shuffle_vector(halves[0], halves[1], order)


def _call(
    context: Any, builder: ir.IRBuilder, wide: str | None, narrow: str, operands: list[Any],
    result: ir.VectorType,
) -> Any:  # fmt: skip
    """An x86 operation on 512 bits, or twice on 256 where ``wide`` is None."""
    if wide is not None:
        return llvm_call(builder, wide, operands, result)
    half = ir.VectorType(result.element, result.count // 2)
    parts = zip(*(_halved(builder, operand) for operand in operands), strict=True)
    return _joined(builder, [llvm_call(builder, narrow, list(part), half) for part in parts])


def _multiply_add_words(context: Any, builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Products of neighbouring 16-bit numbers, added in pairs to 32 bits."""
    wide = "llvm.x86.avx512.pmaddw.d.512" if has_feature(context, "avx512bw") else None
    return _call(context, builder, wide, "llvm.x86.avx2.pmadd.wd", [a, b], I32_VECTOR)


def add_products(
    context: Any, builder: ir.IRBuilder, sums: Any, weights: Any, x: Any, small: bool
) -> Any:
    """sums[i] += the four products of weights' unsigned and x's signed bytes 4 i to 4 i + 3.

    Vectors of 16 int32. ``small``: weights are 15 at most.
    """
    if has_feature(context, "avx512vnni"):
        return _call(
            context, builder, "llvm.x86.avx512.vpdpbusd.512", "", [sums, weights, x], I32_VECTOR
        )
    if has_feature(context, "avxvnni"):
        return _call(
            context, builder, None, "llvm.x86.avx512.vpdpbusd.256", [sums, weights, x], I32_VECTOR
        )
    if has_feature(context, "avx2"):
        if small:  # two products fit 16 bits
            wide = "llvm.x86.avx512.pmaddubs.w.512" if has_feature(context, "avx512bw") else None
            operands = [builder.bitcast(each, _BYTES) for each in (weights, x)]
            pairs = _call(context, builder, wide, "llvm.x86.avx2.pmadd.ub.sw", operands, _WORDS)
            ones = ir.Constant(_WORDS, [1] * _WORDS.count)
            return builder.add(sums, _multiply_add_words(context, builder, pairs, ones))
        eight = ir.Constant(_WORDS, [8] * _WORDS.count)
        words, x_words = builder.bitcast(weights, _WORDS), builder.bitcast(x, _WORDS)
        even = builder.and_(words, ir.Constant(_WORDS, [255] * _WORDS.count))
        x_even = builder.ashr(builder.shl(x_words, eight), eight)
        sums = builder.add(sums, _multiply_add_words(context, builder, even, x_even))
        odd, x_odd = builder.lshr(words, eight), builder.ashr(x_words, eight)
        return builder.add(sums, _multiply_add_words(context, builder, odd, x_odd))
    for byte in range(4):
        weight = builder.and_(builder.lshr(weights, integers(8 * byte)), integers(255))
        signed = builder.ashr(builder.shl(x, integers(24 - 8 * byte)), integers(24))
        sums = builder.add(sums, builder.mul(weight, signed))
    return sums


def splat_i32(builder: ir.IRBuilder, scalar: Any) -> Any:
    """A vector with an int32 scalar in every lane."""
    undefined = ir.Constant(I32_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, integers(0))


def _load_as(builder: ir.IRBuilder, pointer: Any, at: Any, kind: Any) -> Any:
    value = builder.load(builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer()))
    value.align = 1
    return value


def _weights_of_four(
    builder: ir.IRBuilder, weight_format: WeightFormat, codes: Any, four: Any
) -> list[Any]:
    """The codes of four inputs: for each output a 32-bit lane with a byte an input."""
    size = 4 * PANEL // (2 if weight_format is WeightFormat.Q4 else 1)
    pointer = builder.gep(codes, [builder.mul(four, integer(size))])
    if weight_format is WeightFormat.Q4:
        packed = load_unaligned(builder, pointer, I32_VECTOR)
        mask = integers(0x0F0F0F0F)
        shifted = builder.lshr(packed, integers(4))
        return [builder.and_(packed, mask), builder.and_(shifted, mask)]
    return [
        load_unaligned(builder, builder.gep(pointer, [integer(v * 4 * LANES)]), I32_VECTOR)
        for v in range(_VECTORS)
    ]


def _fetch(builder: ir.IRBuilder, pointer: Any, lines: int) -> None:
    """Ask for some cache lines to be brought into the second-level cache."""
    for line in range(lines):
        at = builder.gep(pointer, [integer(line * _LINE)])
        hints = [I32(hint) for hint in (0, 2, 1)]  # read, second level, data
        llvm_call(builder, "llvm.prefetch.p0", [at, *hints], ir.VoidType())


class _CodeProducts:
    """Generates the products of some rows with one panel of codes.

    Sums of a group's codes and totals over groups: a vector for each row and half of the panel.
    """

    def __init__(
        self, context: Any, builder: ir.IRBuilder, weight_format: WeightFormat, rows: int
    ) -> None:
        self._context, self._builder, self._format = context, builder, weight_format
        self._cells = [(r, v) for r in range(rows) for v in range(_VECTORS)]
        self._totals = {cell: self._variable(constant(0.0)) for cell in self._cells}
        self._sums = {cell: self._variable(integers(0)) for cell in self._cells}
        for total in self._totals.values():
            builder.store(constant(0.0), total)

    def _variable(self, value: Any) -> Any:
        return cgutils.alloca_once_value(self._builder, value)

    def add_group(self, block: Any, x_blocks: list[Any]) -> None:
        """Add a group's products; x_blocks: the rows' activation blocks."""
        for r, v in self._cells:
            first = integers(0)
            if self._format is WeightFormat.Q8:
                # Codes are stored 128 too large, to be unsigned.
                offset = _load_as(self._builder, x_blocks[r], integer(_OFFSET), I32)
                first = splat_i32(self._builder, offset)
            self._builder.store(first, self._sums[r, v])
        codes = self._builder.gep(block, [integer(HEADER_BYTES)])
        with cgutils.for_range(self._builder, integer(GROUP // 4), intp=I64) as four:
            self._add_four(codes, four.index, x_blocks)
        for v in range(_VECTORS):
            self._scale(block, v, x_blocks)

    def _add_four(self, codes: Any, four: Any, x_blocks: list[Any]) -> None:
        """Add the products of four inputs to the group's sums."""
        builder = self._builder
        weights = _weights_of_four(builder, self._format, codes, four)
        x_four = builder.mul(four, integer(4))
        for r, x_block in enumerate(x_blocks):
            activations = splat_i32(builder, _load_as(builder, x_block, x_four, I32))
            for v in range(_VECTORS):
                added = add_products(
                    self._context, builder, builder.load(self._sums[r, v]), weights[v],
                    activations, self._format is WeightFormat.Q4,
                )  # fmt: skip
                builder.store(added, self._sums[r, v])

    def _scale(self, block: Any, v: int, x_blocks: list[Any]) -> None:
        """Scale the group's sums of one half of the panel and add them to the totals."""
        builder = self._builder
        scale, minimum = (
            load_halves(self._context, builder, builder.gep(block, [integer(at_header)]))
            for at_header in (v * LANES * 2, HEADER_BYTES // 2 + v * LANES * 2)
        )
        for r, x_block in enumerate(x_blocks):
            x_scale, x_sum = (
                broadcast(builder, _load_as(builder, x_block, integer(i), F32))
                for i in (_SCALE, _SCALED_SUM)
            )
            product = builder.sitofp(builder.load(self._sums[r, v]), F32_VECTOR)
            total = fused_multiply_add(
                builder, product, builder.fmul(scale, x_scale), builder.load(self._totals[r, v])
            )
            total = fused_multiply_add(builder, minimum, x_sum, total)
            builder.store(total, self._totals[r, v])

    def store(self, target: Any) -> None:
        """target[rows, 32] = the totals."""
        for r, v in self._cells:
            pointer = self._builder.gep(target, [integer(r * PANEL + v * LANES)])
            store_unaligned(self._builder, self._builder.load(self._totals[r, v]), pointer)


def _multiply_codes(rows: int, weight_format: WeightFormat) -> Any:
    """Generate the kernel of ``rows`` rows."""

    def operation(
        typing_context: Any,
        x: Any,
        x_offset: Any,
        x_stride: Any,
        groups: Any,
        panel: Any,
        panel_offset: Any,
        ahead: Any,
        tile: Any,
        tile_offset: Any,
    ) -> tuple[Any, Codegen]:
        """tile[rows, 32] = rows of activation blocks @ a packed panel.

        x: uint8, rows x_stride bytes apart from x_offset on. panel: uint8 at panel_offset.
        Meanwhile a third of a block, ``ahead`` bytes from each of the panel's, is fetched into the
        second-level cache; not for one row, which leaves memory no time for that.
        """

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_offset, x_stride, groups, panel, panel_offset, ahead, tile, at = arguments
            kinds = signature.args
            start = address(context, builder, kinds[0], x, x_offset)
            x_rows = [builder.gep(start, [builder.mul(x_stride, integer(r))]) for r in range(rows)]
            panel_pointer = address(context, builder, kinds[4], panel, panel_offset)
            products = _CodeProducts(context, builder, weight_format, rows)
            with cgutils.for_range(builder, groups, intp=I64) as group:
                offset = builder.mul(group.index, integer(block_bytes(weight_format)))
                block = builder.gep(panel_pointer, [offset])
                if rows > 1:
                    _fetch(builder, builder.gep(block, [ahead]), _FETCHED_LINES[weight_format])
                x_at = builder.mul(group.index, integer(ROUNDED_BYTES))
                products.add_group(block, [builder.gep(row, [x_at]) for row in x_rows])
            products.store(address(context, builder, kinds[7], tile, at))
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, index, panel, index, index, tile, index), codegen

    return intrinsic(operation)


multiply_q4_1 = _multiply_codes(1, WeightFormat.Q4)
multiply_q4_2 = _multiply_codes(2, WeightFormat.Q4)
multiply_q4_3 = _multiply_codes(3, WeightFormat.Q4)
multiply_q4_4 = _multiply_codes(4, WeightFormat.Q4)
multiply_q8_1 = _multiply_codes(1, WeightFormat.Q8)
multiply_q8_2 = _multiply_codes(2, WeightFormat.Q8)
multiply_q8_3 = _multiply_codes(3, WeightFormat.Q8)
multiply_q8_4 = _multiply_codes(4, WeightFormat.Q8)


@intrinsic  # type: ignore[untyped-decorator]
def _round(typing_context: Any, value: Any) -> tuple[Any, Codegen]:
    """The nearest whole number, ties to even, lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return llvm_call(builder, "llvm.rint.v16f32", [arguments[0]], F32_VECTOR)

    return f32x16(f32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _put_bytes(typing_context: Any, array: Any, offset: Any, value: Any) -> tuple[Any, Codegen]:
    """Whole numbers -128..127 as 16 int8 at byte ``offset`` of a uint8 array."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(context, builder, signature.args[0], arguments[0], arguments[1])
        whole = builder.fptosi(arguments[2], I32_VECTOR)
        store_unaligned(builder, builder.trunc(whole, ir.VectorType(I8, LANES)), pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _put_sums(
    typing_context: Any, array: Any, offset: Any, scale: Any, total: Any
) -> tuple[Any, Codegen]:
    """The three numbers behind the codes of the block at byte ``offset``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, offset, scale, total = arguments
        pointer = address(context, builder, signature.args[0], array, offset)
        biased = builder.fptosi(builder.fmul(total, F32(-128.0)), I32)
        for at, value in (
            (_SCALE, scale),
            (_SCALED_SUM, builder.fmul(scale, total)),
            (_OFFSET, biased),
        ):
            store_unaligned(builder, value, builder.gep(pointer, [integer(at)]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32, types.float32), codegen


@kernel
def round_row(x: Any, x_at: int, size: int, blocks: Any, blocks_at: int) -> None:
    """Round x[x_at:x_at + size] (size a multiple of 32) to activation blocks at byte blocks_at."""
    for group in range(size // GROUP):
        at = x_at + group * GROUP
        low, high = load(x, at), load(x, at + LANES)
        span = max_lanes(maximum(absolute(low), absolute(high)))
        factor = splat(_STEPS / span if span > np.float32(0.0) else np.float32(0.0))
        low, high = _round(multiply(low, factor)), _round(multiply(high, factor))
        block = blocks_at + group * ROUNDED_BYTES
        _put_bytes(blocks, block, low)
        _put_bytes(blocks, block + LANES, high)
        _put_sums(blocks, block, span / _STEPS, sum_lanes(add(low, high)))
