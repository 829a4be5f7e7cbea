"""Integer products: rows of int8 activations times panels of weights of 3 to 8 bits.

Products of quants are summed as integers, which is exact. The sum of the 32 inputs (or 16) that
share a scale is then scaled and added to the row's, from the first inputs to the last. So a row
has the same bits whatever other rows a call computes, and on every chip, whichever instruction
sums the products: vpdpbusd (VNNI), vpmaddubsw and vpmaddwd (AVX-512BW, AVX2), ARM's sdot, or plain
integer arithmetic.

Blocks of activations are described in activations.py, panels of weights in weight_formats.py.
"""

from collections.abc import Sequence
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
    look_up,
    weights_of_fours,
)
from midfill.kernels.cpu.simd import (
    F32,
    F32_VECTOR,
    I8,
    I32,
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
    opaque,
    store_unaligned,
)
from midfill.kernels.cpu.weight_formats import (
    GROUP,
    PANEL,
    BlockLayout,
    WeightFormat,
    layout_of,
)

WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


def _as_bytes(builder: ir.IRBuilder, vector: Any) -> Any:
    return builder.bitcast(vector, ir.VectorType(I8, 4 * vector.type.count))


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


def _opaque_vector(context: Any, builder: ir.IRBuilder, vector: Any) -> Any:
    if has_feature(context, "avx512f"):
        return opaque(builder, vector)
    return _joined(builder, [opaque(builder, half) for half in _halved(builder, vector)])


def _call(
    builder: ir.IRBuilder, name: str, operands: list[Any], result: ir.VectorType, parts: int = 1
) -> Any:
    """Call an operation on whole vectors, or on each of 2 or 4 parts of them."""
    if parts == 1:
        return llvm_call(builder, name, operands, result)
    half = ir.VectorType(result.element, result.count // 2)
    halves = zip(*(_halved(builder, operand) for operand in operands), strict=True)
    return _joined(builder, [_call(builder, name, list(h), half, parts // 2) for h in halves])


def multiply_add_words(context: Any, builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Multiply 16 or 32 16-bit numbers and add neighbouring products to 32 bits."""
    lanes = a.type.count // 2
    sums = ir.VectorType(I32, lanes)
    if lanes == LANES and has_feature(context, "avx512bw"):
        return _call(builder, "llvm.x86.avx512.pmaddw.d.512", [a, b], sums)
    return _call(builder, "llvm.x86.avx2.pmadd.wd", [a, b], sums, parts=lanes // 8)


def add_products(context: Any, builder: ir.IRBuilder, sums: Any, weights: Any, x: Any) -> Any:
    """Add to sums[i] the four products of weights' unsigned and x's signed bytes 4i to 4i + 3.

    ARM's instruction multiplies signed bytes, so weights that are not below 128 must be signed
    there.

    Args:
        sums, weights, x: vectors of 8 or 16 int32.
    """
    operands, kind = [sums, weights, x], sums.type
    if kind.count == LANES and has_feature(context, "avx512vnni"):
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", operands, kind)
    if has_feature(context, "avxvnni") or has_feature(context, "avx512vnni"):
        name = "llvm.x86.avx512.vpdpbusd.256"
        return _call(builder, name, operands, kind, parts=kind.count // 8)
    if has_dot_products(context):
        operands = [sums, *(_as_bytes(builder, each) for each in (weights, x))]
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        return _call(builder, name, operands, kind, parts=kind.count // 4)
    if has_feature(context, "avx2"):  # weights of 8 bits: pairs of products don't fit 16 bits
        halves = ir.VectorType(ir.IntType(16), 2 * kind.count)
        eight, low = (ir.Constant(halves, [value] * halves.count) for value in (8, 255))
        words, x_words = builder.bitcast(weights, halves), builder.bitcast(x, halves)
        even = builder.and_(words, low)
        x_even = builder.ashr(builder.shl(x_words, eight), eight)
        sums = builder.add(sums, multiply_add_words(context, builder, even, x_even))
        odd, x_odd = builder.lshr(words, eight), builder.ashr(x_words, eight)
        return builder.add(sums, multiply_add_words(context, builder, odd, x_odd))
    for byte in range(4):
        up, down, mask = (
            ir.Constant(kind, [value] * kind.count) for value in (24 - 8 * byte, 8 * byte, 255)
        )
        weight = builder.and_(builder.lshr(weights, down), mask)
        signed = builder.ashr(builder.shl(x, up), ir.Constant(kind, [24] * kind.count))
        sums = builder.add(sums, builder.mul(weight, signed))
    return sums


def multiply_pairs(context: Any, builder: ir.IRBuilder, weights: Any, x: Any) -> Any:
    """Return 16 or 32 int16: sums of two products of neighbouring bytes, on a chip with AVX2.

    Args:
        context, builder: of the code.
        weights: 8 or 16 int32 of bytes below 128.
        x: as many int32 of bytes -127 to 127.
    """
    operands = [_as_bytes(builder, each) for each in (weights, x)]
    lanes = weights.type.count
    pairs = ir.VectorType(ir.IntType(16), 2 * lanes)
    if lanes == LANES and has_feature(context, "avx512bw"):
        return _call(builder, "llvm.x86.avx512.pmaddubs.w.512", operands, pairs)
    return _call(builder, "llvm.x86.avx2.pmadd.ub.sw", operands, pairs, parts=lanes // 8)


def pairs_in_int16(context: Any, bits: int) -> int:
    """Return how many sums of two products an int16 holds the sum of, as a power of 2.

    Chips with AVX2 and without VNNI multiply bytes to such sums. Adding them up before they are
    widened to 32 bits takes a third fewer instructions.

    Args:
        context: of the code.
        bits: of the weights.

    Returns:
        the number; 0 where products are not computed so.
    """
    has_vnni = any(has_feature(context, each) for each in ("avx512vnni", "avxvnni"))
    if bits == 8 or has_vnni or not has_feature(context, "avx2"):
        return 0
    largest = 2 * 127 * ((1 << bits) - 1)
    return int(1 << (0x7FFF // largest).bit_length() - 1)


class _QuantProducts:
    """Generator of the products of some rows with one panel of quants.

    Keeps the integer sums of the inputs that share a scale and the float totals over them: a
    vector of each per row and half of the panel.
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, layout: BlockLayout, rows: int) -> None:
        self._context, self._builder, self._layout, self._rows = context, builder, layout, rows
        # 8 bits: the quant minus 128, their zero, which is the quant with its highest bit flipped.
        self._takes_signed = layout.bits == 8 and has_dot_products(context)
        self._summed_pairs = pairs_in_int16(context, layout.quant_bits)
        self._pairs: dict[tuple[int, int], Any] = {}
        # With 16 registers, the sums of four rows fit for half of a panel at a time.
        has_few = self._summed_pairs > 0 and rows > 2 and not has_feature(context, "avx512bw")
        self._columns = [(v,) for v in range(VECTORS)] if has_few else [range(VECTORS)]
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
        in_part = layout.scaled_inputs // 4
        shared = max(1, 8 // min(layout.planes) // VECTORS)  # they share bytes of a plane
        fours = max(shared, min(in_part, self._summed_pairs))
        for part in range(GROUP // layout.scaled_inputs):
            for columns in self._columns:
                if len(self._columns) > 1:  # read again, rather than kept in memory meanwhile
                    quants, *x_blocks = (opaque(builder, each) for each in (quants, *x_blocks))
                self._start_sums(part, columns, x_blocks)
                steps = in_part // fours
                with cgutils.for_range(builder, integer(steps), intp=I64) as step:
                    number = builder.add(step.index, integer(part * steps))
                    first = builder.mul(number, integer(fours))
                    for four in range(0, fours, shared):
                        at = builder.add(first, integer(four))
                        self._add_fours(quants, at, shared, columns, x_blocks)
                    self._widen_pairs()
                for v in columns:
                    self._scale(block, group, part, v, x_blocks)

    def _start_sums(self, part: int, columns: Sequence[int], x_blocks: list[Any]) -> None:
        """Begin the sums with -zero * (sum of activations): quants are stored unsigned."""
        builder, zero = self._builder, self._layout.zero
        for r, x_block in enumerate(x_blocks):
            first = integers(0)
            if zero and not self._takes_signed:
                first = broadcast(builder, load_as(builder, x_block, integer(OFFSET), I32))
                if self._layout.scales == 2:
                    other = broadcast(builder, load_as(builder, x_block, integer(HALF_OFFSET), I32))
                    first = other if part == 0 else builder.sub(first, other)
                # The block has -128 * sum.
                first = builder.ashr(first, integers((128 // zero).bit_length() - 1))
            for v in columns:
                builder.store(first, self._sums[r, v])

    def _add_fours(
        self, quants: Any, first: Any, fours: int, columns: Sequence[int], x_blocks: list[Any]
    ) -> None:
        """Add the products of some fours of inputs and some columns to their sums."""
        context, builder, layout = self._context, self._builder, self._layout
        weights = weights_of_fours(builder, layout, quants, first, fours)
        if layout.lookup:
            weights = [look_up(context, builder, layout.lookup, each) for each in weights]
        if self._takes_signed:
            weights = [builder.xor(each, integers(0x80808080)) for each in weights]
        x_at = builder.mul(first, integer(4))
        for four in range(fours):
            at = builder.add(x_at, integer(4 * four))
            for r, x_block in enumerate(x_blocks):
                activations = broadcast(builder, load_as(builder, x_block, at, I32))
                for v in columns:
                    operands = weights[four * VECTORS + v], activations
                    if self._summed_pairs:
                        self._add_pairs((r, v), multiply_pairs(context, builder, *operands))
                        continue
                    sums = builder.load(self._sums[r, v])
                    builder.store(add_products(context, builder, sums, *operands), self._sums[r, v])

    def _add_pairs(self, index: tuple[int, int], pairs: Any) -> None:
        """Add sums of two products to those in int16.

        If LLVM saw that this is a sum, it would add up one row after the other and keep all weights
        in memory meanwhile.
        """
        builder, before = self._builder, self._pairs.get(index)
        if before is not None:
            pairs = builder.add(before, pairs)
        self._pairs[index] = _opaque_vector(self._context, builder, pairs)

    def _widen_pairs(self) -> None:
        """Add the sums in int16 to those in int32."""
        builder = self._builder
        ones = ir.Constant(WORDS, [1] * WORDS.count)
        for index, pairs in self._pairs.items():
            widened = multiply_add_words(self._context, builder, pairs, ones)
            builder.store(builder.add(builder.load(self._sums[index]), widened), self._sums[index])
        self._pairs.clear()

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
    layout = layout_of(weight_format)

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
