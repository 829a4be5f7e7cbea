"""Integer products: rows of int8 activations times panels of weights of 3 to 8 bits.

Products of quants are summed as integers, which is exact. The sum of the 32 inputs (or 16) that
share a scale is then scaled and added to the row's, from the first inputs to the last. So a row
has the same bits whatever other rows a call computes, and on every chip, whichever instruction
sums the products: vpdpbusd (VNNI), vpmaddubsw and vpmaddwd (AVX-512BW, AVX2), ARM's sdot, or plain
integer arithmetic.

Blocks of activations are described in activations.py, panels of weights in weight_formats.py.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.activations import (
    ACTIVATION_BLOCK_BYTES,
    HALF_OFFSET,
    OFFSET,
    SCALE,
    SCALED_SUM,
)
from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.neon import has_dot_products
from midfill.kernels.cpu.panel_blocks import (
    VECTORS,
    fetch_ahead,
    load_as,
    load_factor,
    weights_of_fours,
)
from midfill.kernels.cpu.simd import (
    F32,
    F32_VECTOR,
    I8,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    address,
    broadcast,
    constant,
    fused_multiply_add,
    has_feature,
    integer,
    integers,
    llvm_call,
    store_unaligned,
)
from midfill.kernels.cpu.weight_formats import GROUP, LAYOUTS, PANEL, BlockLayout, WeightFormat

_BYTES = ir.VectorType(I8, 4 * LANES)
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


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
    builder: ir.IRBuilder, name: str, operands: list[Any], result: ir.VectorType, parts: int = 1
) -> Any:
    """Call an operation on whole vectors, or on each of 2 or 4 parts of them."""
    if parts == 1:
        return llvm_call(builder, name, operands, result)
    half = ir.VectorType(result.element, result.count // 2)
    halves = zip(*(_halved(builder, operand) for operand in operands), strict=True)
    return _joined(builder, [_call(builder, name, list(h), half, parts // 2) for h in halves])


def _multiply_add_words(context: Any, builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Multiply 16-bit numbers and add neighbouring products to 32 bits."""
    if has_feature(context, "avx512bw"):
        return _call(builder, "llvm.x86.avx512.pmaddw.d.512", [a, b], I32_VECTOR)
    return _call(builder, "llvm.x86.avx2.pmadd.wd", [a, b], I32_VECTOR, parts=2)


def add_products(
    context: Any, builder: ir.IRBuilder, sums: Any, weights: Any, x: Any, small: bool
) -> Any:
    """Add to sums[i] the four products of weights' unsigned and x's signed bytes 4i to 4i + 3.

    ARM's instruction multiplies signed bytes, so weights that are not small must be signed there.

    Args:
        sums, weights, x: vectors of 16 int32.
        small: weights are below 128.
    """
    operands = [sums, weights, x]
    if has_feature(context, "avx512vnni"):
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", operands, I32_VECTOR)
    if has_feature(context, "avxvnni"):
        return _call(builder, "llvm.x86.avx512.vpdpbusd.256", operands, I32_VECTOR, parts=2)
    if has_dot_products(context):
        operands = [sums, *(builder.bitcast(each, _BYTES) for each in (weights, x))]
        return _call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", operands, I32_VECTOR, parts=4)
    if has_feature(context, "avx2"):
        if small:  # two products fit 16 bits, as activations are -127 to 127
            operands = [builder.bitcast(each, _BYTES) for each in (weights, x)]
            if has_feature(context, "avx512bw"):
                pairs = _call(builder, "llvm.x86.avx512.pmaddubs.w.512", operands, _WORDS)
            else:
                pairs = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", operands, _WORDS, parts=2)
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


class _QuantProducts:
    """Generator of the products of some rows with one panel of quants.

    Keeps the integer sums of the inputs that share a scale and the float totals over them: a
    vector of each per row and half of the panel.
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, layout: BlockLayout, rows: int) -> None:
        self._context, self._builder, self._layout, self._rows = context, builder, layout, rows
        # 8 bits: the quant minus 128, their zero, which is the quant with its highest bit flipped.
        self._takes_signed = layout.bits == 8 and has_dot_products(context)
        self._indices = [(r, v) for r in range(rows) for v in range(VECTORS)]
        self._totals = {index: self._variable(constant(0.0)) for index in self._indices}
        self._sums = {index: self._variable(integers(0)) for index in self._indices}
        for total in self._totals.values():
            builder.store(constant(0.0), total)

    def _variable(self, value: Any) -> Any:
        return cgutils.alloca_once_value(self._builder, value)

    def add_block(self, block: Any, x_blocks: list[Any], ahead: Any) -> None:
        """Add a block's products.

        Args:
            block: the panel's block, see weight_formats.py.
            x_blocks: the rows' first blocks, see activations.py.
            ahead: see ``quantized_product``.
        """
        layout, builder = self._layout, self._builder
        body = builder.gep(block, [integer(layout.header_bytes)])
        if layout.groups == 1:
            fetch_ahead(builder, layout, block, ahead)
            self._add_group(block, body, x_blocks)
            return
        with cgutils.for_range(builder, integer(layout.groups), intp=I64) as group:
            x_at = builder.mul(group.index, integer(ACTIVATION_BLOCK_BYTES))
            at = builder.mul(group.index, integer(layout.group_bytes))
            start = builder.gep(body, [at])
            fetch_ahead(builder, layout, start, ahead)
            self._add_group(block, start, [builder.gep(x, [x_at]) for x in x_blocks])

    def _add_group(self, block: Any, group: Any, x_blocks: list[Any]) -> None:
        """Add the products of one group, part by part that has a scale of its own."""
        builder, layout = self._builder, self._layout
        quants = builder.gep(group, [integer(layout.integer_bytes)])
        fours = max(1, 8 // min(layout.planes) // VECTORS)
        steps = layout.scaled_inputs // 4 // fours
        for part in range(GROUP // layout.scaled_inputs):
            self._start_sums(part, x_blocks)
            with cgutils.for_range(builder, integer(steps), intp=I64) as step:
                number = builder.add(step.index, integer(part * steps))
                self._add_fours(quants, builder.mul(number, integer(fours)), fours, x_blocks)
            for v in range(VECTORS):
                self._scale(block, group, part, v, x_blocks)

    def _start_sums(self, part: int, x_blocks: list[Any]) -> None:
        """Begin the sums with -zero * (sum of activations): quants are stored unsigned."""
        builder, zero = self._builder, self._layout.zero
        for r, x_block in enumerate(x_blocks):
            first = integers(0)
            if zero and not self._takes_signed:
                first = broadcast(builder, load_as(builder, x_block, integer(OFFSET), I32))
                if self._layout.scales == 2:
                    half = broadcast(builder, load_as(builder, x_block, integer(HALF_OFFSET), I32))
                    first = half if part == 0 else builder.sub(first, half)
                # The block has -128 * sum.
                first = builder.ashr(first, integers((128 // zero).bit_length() - 1))
            for v in range(VECTORS):
                builder.store(first, self._sums[r, v])

    def _add_fours(self, quants: Any, first: Any, fours: int, x_blocks: list[Any]) -> None:
        """Add the products of some fours of inputs to the sums."""
        builder, layout = self._builder, self._layout
        weights = weights_of_fours(builder, layout, quants, first, fours)
        if self._takes_signed:
            weights = [builder.xor(each, integers(0x80808080)) for each in weights]
        x_at = builder.mul(first, integer(4))
        for four in range(fours):
            at = builder.add(x_at, integer(4 * four))
            for r, x_block in enumerate(x_blocks):
                activations = broadcast(builder, load_as(builder, x_block, at, I32))
                for v in range(VECTORS):
                    added = add_products(
                        self._context, builder, builder.load(self._sums[r, v]),
                        weights[four * VECTORS + v], activations, layout.bits < 8,
                    )  # fmt: skip
                    builder.store(added, self._sums[r, v])

    def _scale(self, block: Any, group: Any, part: int, v: int, x_blocks: list[Any]) -> None:
        """Scale the sums of one half of the panel and add them to the totals."""
        builder, layout = self._builder, self._layout
        at = (self._context, builder, layout, block, group)
        scale = load_factor(*at, 0, part, v)
        minimum = load_factor(*at, 1, layout.scales, v) if layout.has_minima else None
        for r, x_block in enumerate(x_blocks):
            x_scale = broadcast(builder, load_as(builder, x_block, integer(SCALE), F32))
            product = builder.sitofp(builder.load(self._sums[r, v]), F32_VECTOR)
            total = fused_multiply_add(
                builder, product, builder.fmul(scale, x_scale), builder.load(self._totals[r, v])
            )
            if minimum is not None:
                x_sum = broadcast(builder, load_as(builder, x_block, integer(SCALED_SUM), F32))
                total = fused_multiply_add(builder, minimum, x_sum, total)
            builder.store(total, self._totals[r, v])

    def store(self, target: Any) -> None:
        """Store the totals to target[rows, 32]."""
        for r, v in self._indices:
            pointer = self._builder.gep(target, [integer(r * PANEL + v * LANES)])
            store_unaligned(self._builder, self._builder.load(self._totals[r, v]), pointer)


def quantized_product(rows: int, weight_format: WeightFormat) -> Any:
    """Generate the product of ``rows`` rows with panels of one format."""
    layout = LAYOUTS[weight_format]

    @generated(types.void, OWN, INDEX, INDEX, INDEX, OWN, INDEX, INDEX, OWN, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute tile[rows, 32] = rows of activation blocks @ a packed panel.

        A panel's first tile reads it from memory, and may prefetch a few groups ahead. Later tiles
        prefetch a third of a group of the next panel per group read: memory would be idle while
        they reuse this one.

        Args:
            x: uint8, activation blocks; rows are x_stride bytes apart, from x_offset on.
            groups: of 32 inputs per row; a multiple of the format's groups per block.
            panel: uint8, the panel starts at panel_offset.
            ahead: distance in bytes from a group to what is prefetched meanwhile; for the first
                tile, which has a distance of its own, a negated ``tiles.Prefetch``.
            tile: float32, [rows, 32] at tile_offset.
        """
        x, x_offset, x_stride, groups, panel, panel_offset, ahead, tile, at = arguments
        start = address(context, builder, kinds[0], x, x_offset)
        x_rows = [builder.gep(start, [builder.mul(x_stride, integer(r))]) for r in range(rows)]
        panel_pointer = address(context, builder, kinds[4], panel, panel_offset)
        products = _QuantProducts(context, builder, layout, rows)
        count = builder.udiv(groups, integer(layout.groups))
        with cgutils.for_range(builder, count, intp=I64) as number:
            offset = builder.mul(number.index, integer(layout.block_bytes))
            block = builder.gep(panel_pointer, [offset])
            x_step = integer(layout.groups * ACTIVATION_BLOCK_BYTES)
            x_at = builder.mul(number.index, x_step)
            x_blocks = [builder.gep(row, [x_at]) for row in x_rows]
            products.add_block(block, x_blocks, ahead)
        products.store(address(context, builder, kinds[7], tile, at))

    return operation
