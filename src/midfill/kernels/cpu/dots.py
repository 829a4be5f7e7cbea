"""Integer products: rows of int8 activations times panels of 4- or 8-bit weights.

Products of quants are summed as integers, which is exact. The sum of each group of 32 inputs is
then scaled and added to the row's, from the first group to the last. So a row has the same bits
whatever other rows a call computes, and on every chip, whichever instruction sums the products:
vpdpbusd (VNNI), vpmaddubsw and vpmaddwd (AVX-512BW, AVX2), or plain integer arithmetic.

Blocks of activations are described in activations.py, panels of weights in packing.py.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from midfill.kernels.cpu.activations import ACTIVATION_BLOCK_BYTES, OFFSET, SCALE, SCALED_SUM
from midfill.kernels.cpu.halves import load_halves
from midfill.kernels.cpu.memory import LINE
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
    address,
    broadcast,
    constant,
    fused_multiply_add,
    has_feature,
    integer,
    integers,
    llvm_call,
    load_unaligned,
    store_unaligned,
)

_VECTORS = PANEL // LANES
_BYTES = ir.VectorType(I8, 4 * LANES)
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_FETCHED_LINES = {WeightFormat.Q4: 4, WeightFormat.Q8: 6}
"""Cache lines fetched ahead per block: a third of a block, rounded up."""
Q4_FETCHED, Q8_FETCHED = (lines * LINE for lines in _FETCHED_LINES.values())
"""The same in bytes."""


def _halved(builder: ir.IRBuilder, vector: Any) -> list[Any]:
    """Split a vector into its lower and upper half."""
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
    """Call an x86 operation on 512 bits, or twice on 256 where ``wide`` is None."""
    if wide is not None:
        return llvm_call(builder, wide, operands, result)
    half = ir.VectorType(result.element, result.count // 2)
    parts = zip(*(_halved(builder, operand) for operand in operands), strict=True)
    return _joined(builder, [llvm_call(builder, narrow, list(part), half) for part in parts])


def _multiply_add_words(context: Any, builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Multiply 16-bit numbers and add neighbouring products to 32 bits."""
    wide = "llvm.x86.avx512.pmaddw.d.512" if has_feature(context, "avx512bw") else None
    return _call(context, builder, wide, "llvm.x86.avx2.pmadd.wd", [a, b], I32_VECTOR)


def add_products(
    context: Any, builder: ir.IRBuilder, sums: Any, weights: Any, x: Any, small: bool
) -> Any:
    """Add to sums[i] the four products of weights' unsigned and x's signed bytes 4i to 4i + 3.

    Args:
        sums, weights, x: vectors of 16 int32.
        small: weights are at most 15.
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
    """Return a vector with an int32 scalar in every lane."""
    undefined = ir.Constant(I32_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, integers(0))


def _load_as(builder: ir.IRBuilder, pointer: Any, at: Any, kind: Any) -> Any:
    value = builder.load(builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer()))
    value.align = 1
    return value


def _weights_of_four(
    builder: ir.IRBuilder, weight_format: WeightFormat, quants: Any, four: Any
) -> list[Any]:
    """Return the quants of four inputs: per output a 32-bit lane, per input a byte of it."""
    size = 4 * PANEL // (2 if weight_format is WeightFormat.Q4 else 1)
    pointer = builder.gep(quants, [builder.mul(four, integer(size))])
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
    """Prefetch cache lines into the second-level cache."""
    for line in range(lines):
        at = builder.gep(pointer, [integer(line * LINE)])
        hints = [I32(hint) for hint in (0, 2, 1)]  # read, second level, data
        llvm_call(builder, "llvm.prefetch.p0", [at, *hints], ir.VoidType())


class _QuantProducts:
    """Generator of the products of some rows with one panel of quants.

    Keeps a group's integer sums and the float totals over groups: a vector of each per row and
    half of the panel.
    """

    def __init__(
        self, context: Any, builder: ir.IRBuilder, weight_format: WeightFormat, rows: int
    ) -> None:
        self._context, self._builder, self._format = context, builder, weight_format
        self._indices = [(r, v) for r in range(rows) for v in range(_VECTORS)]
        self._totals = {index: self._variable(constant(0.0)) for index in self._indices}
        self._sums = {index: self._variable(integers(0)) for index in self._indices}
        for total in self._totals.values():
            builder.store(constant(0.0), total)

    def _variable(self, value: Any) -> Any:
        return cgutils.alloca_once_value(self._builder, value)

    def add_group(self, block: Any, x_blocks: list[Any]) -> None:
        """Add a group's products.

        Args:
            block: the panel's block, see packing.py.
            x_blocks: the rows' blocks, see activations.py.
        """
        for r, v in self._indices:
            first = integers(0)
            if self._format is WeightFormat.Q8:
                # Weights are stored 128 too large, to be unsigned.
                offset = _load_as(self._builder, x_blocks[r], integer(OFFSET), I32)
                first = splat_i32(self._builder, offset)
            self._builder.store(first, self._sums[r, v])
        quants = self._builder.gep(block, [integer(HEADER_BYTES)])
        with cgutils.for_range(self._builder, integer(GROUP // 4), intp=I64) as four:
            self._add_four(quants, four.index, x_blocks)
        for v in range(_VECTORS):
            self._scale(block, v, x_blocks)

    def _add_four(self, quants: Any, four: Any, x_blocks: list[Any]) -> None:
        """Add the products of four inputs to the group's sums."""
        builder = self._builder
        weights = _weights_of_four(builder, self._format, quants, four)
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
                for i in (SCALE, SCALED_SUM)
            )
            product = builder.sitofp(builder.load(self._sums[r, v]), F32_VECTOR)
            total = fused_multiply_add(
                builder, product, builder.fmul(scale, x_scale), builder.load(self._totals[r, v])
            )
            total = fused_multiply_add(builder, minimum, x_sum, total)
            builder.store(total, self._totals[r, v])

    def store(self, target: Any) -> None:
        """Store the totals to target[rows, 32]."""
        for r, v in self._indices:
            pointer = self._builder.gep(target, [integer(r * PANEL + v * LANES)])
            store_unaligned(self._builder, self._builder.load(self._totals[r, v]), pointer)


def _multiply_quants(rows: int, weight_format: WeightFormat) -> Any:
    """Generate the kernel for ``rows`` rows."""

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
        """Compute tile[rows, 32] = rows of activation blocks @ a packed panel.

        With more than one row, a third of a block is prefetched per block read: memory is idle
        while a panel is reused. One row reads as fast as memory can deliver.

        Args:
            x: uint8, activation blocks; rows are x_stride bytes apart, from x_offset on.
            groups: blocks per row.
            panel: uint8, the panel starts at panel_offset.
            ahead: distance in bytes from a block to what is prefetched meanwhile.
            tile: float32, [rows, 32] at tile_offset.
        """

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_offset, x_stride, groups, panel, panel_offset, ahead, tile, at = arguments
            kinds = signature.args
            start = address(context, builder, kinds[0], x, x_offset)
            x_rows = [builder.gep(start, [builder.mul(x_stride, integer(r))]) for r in range(rows)]
            panel_pointer = address(context, builder, kinds[4], panel, panel_offset)
            products = _QuantProducts(context, builder, weight_format, rows)
            with cgutils.for_range(builder, groups, intp=I64) as group:
                offset = builder.mul(group.index, integer(block_bytes(weight_format)))
                block = builder.gep(panel_pointer, [offset])
                if rows > 1:
                    _fetch(builder, builder.gep(block, [ahead]), _FETCHED_LINES[weight_format])
                x_at = builder.mul(group.index, integer(ACTIVATION_BLOCK_BYTES))
                products.add_group(block, [builder.gep(row, [x_at]) for row in x_rows])
            products.store(address(context, builder, kinds[7], tile, at))
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, index, panel, index, index, tile, index), codegen

    return intrinsic(operation)


multiply_q4_1 = _multiply_quants(1, WeightFormat.Q4)
multiply_q4_2 = _multiply_quants(2, WeightFormat.Q4)
multiply_q4_3 = _multiply_quants(3, WeightFormat.Q4)
multiply_q4_4 = _multiply_quants(4, WeightFormat.Q4)
multiply_q8_1 = _multiply_quants(1, WeightFormat.Q8)
multiply_q8_2 = _multiply_quants(2, WeightFormat.Q8)
multiply_q8_3 = _multiply_quants(3, WeightFormat.Q8)
multiply_q8_4 = _multiply_quants(4, WeightFormat.Q8)
