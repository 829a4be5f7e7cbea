"""Integer products on AMX: 16 or 48 rows of int8 activations times panels of quants.

AMX has eight tile registers of up to 16 rows of 64 bytes, and one instruction that multiplies a
tile of int8 by another into a tile of int32. Its sums are integers, thus exact in any order, and
they are scaled and added outside the tiles, group by group, with the operations of dots.py in the
same order. So a row has the bits that it has in any other tile.

Activations are read where they are: a tile of 16 rows and the 32 inputs of a group. A panel's
vectors of four inputs times 16 outputs are what a second operand's rows must be; quants of fewer
bits are unpacked first, 8 groups at a time, for all of the call's rows. Inputs that share a scale
make a product of their own: half a tile's 64 inputs, or a quarter where groups have two scales.
16 rows times 16 outputs are summed over the 8 groups in 16 vector registers, while the next group's
integers are computed.

An estimate in cycles for 16 rows, 16 outputs and a group of 32 inputs, from the throughputs in
Intel's optimization manual: product 16, tile store 16, reading tiles 12, beside each other and
beside 48 vector operations on two ports (24; 32 with minima) and 56 reads on two ports (28). So
about 30, where dots.py with VNNI needs 11 or 12 vector operations per row, thus about 90. No chip
has confirmed this: ``runners.cpu.autotune`` measures both and uses the faster one.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.activations import ACTIVATION_BLOCK_BYTES, SCALE, SCALED_SUM
from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.memory import LINE
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
    I32_VECTOR,
    I64,
    LANES,
    address,
    broadcast,
    constant,
    fused_multiply_add,
    has_feature,
    integer,
    llvm_call,
    load_unaligned,
    store_unaligned,
)
from midfill.kernels.cpu.weight_formats import GROUP, LAYOUTS, PANEL, BlockLayout, WeightFormat

AMX_FEATURE = "amx-int8"
"""LLVM's name of what the chip must have. A process also needs the kernel's permission."""
AMX_ROWS = 16
"""Rows of a tile register; a product's rows are a multiple of it."""
_CHUNK = 8
"""Groups that are unpacked at a time: they fit the first-level cache, with all rows' quants."""
_SUMS_TILE = 0
_OPERAND_TILES = {32: (1, 2), 16: (3, 4)}
"""Tile registers of activations and weights, by the inputs that share a scale."""
_TILE_BYTES = AMX_ROWS * LINE
_SUMS_BYTES = 2 * 2 * _TILE_BYTES
"""Sums of two groups, each in up to two parts."""
SCRATCH_FLOATS = (_CHUNK * GROUP * PANEL + _SUMS_BYTES) // 4
"""Memory that a product needs beside its tile: unpacked weights, then sums."""
_FOURS = GROUP // 4


def _tile_shapes() -> bytes:
    """Return LDTILECFG's operand: palette 1, each tile's bytes per row, and its rows."""
    shapes = {_SUMS_TILE: (AMX_ROWS, LINE)}
    for inputs, (x_tile, weight_tile) in _OPERAND_TILES.items():
        shapes[x_tile], shapes[weight_tile] = (AMX_ROWS, inputs), (inputs // 4, LINE)
    config = bytearray(64)
    config[0] = 1
    for tile, (rows, row_bytes) in shapes.items():
        config[16 + 2 * tile], config[48 + tile] = row_bytes, rows
    return bytes(config)


def _amx(builder: ir.IRBuilder, name: str, *arguments: Any) -> None:
    """Emit an AMX instruction; tile registers are given by their numbers."""
    operands = [I8(each) if isinstance(each, int) else each for each in arguments]
    llvm_call(builder, f"llvm.x86.{name}", operands, ir.VoidType())


@generated(types.void)
def configure_amx(context: Any, builder: Any, kinds: Any) -> None:
    """Give this thread's tile registers their shapes; products need that."""
    if has_feature(context, AMX_FEATURE):
        shapes = ir.Constant(ir.ArrayType(I8, 64), bytearray(_tile_shapes()))
        config = cgutils.global_constant(builder, "amx_shapes", shapes)
        _amx(builder, "ldtilecfg", builder.bitcast(config, I8.as_pointer()))


@generated(types.void)
def release_amx(context: Any, builder: Any, kinds: Any) -> None:
    """Give the tile registers back: a thread without them is switched as fast as any."""
    if has_feature(context, AMX_FEATURE):
        _amx(builder, "tilerelease")


class _AmxProducts:
    """Generator of the products of some rows with one panel of quants."""

    def __init__(
        self, context: Any, builder: ir.IRBuilder, layout: BlockLayout, stride: Any, scratch: Any
    ) -> None:
        """Begin.

        Args:
            context, builder: of the code.
            layout: of the panel's format.
            stride: bytes from one row of activations to the next.
            scratch: memory of SCRATCH_FLOATS.
        """
        self._context, self._builder, self._layout = context, builder, layout
        self._stride = stride
        self._weights = scratch
        self._sums = builder.gep(scratch, [integer(_CHUNK * GROUP * PANEL)])
        self._totals = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(AMX_ROWS)]

    def add_groups(
        self, chunk: Any, count: Any, x: Any, row_tiles: Any, ahead: Any, target: Any
    ) -> None:
        """Add the products of up to 8 groups to target[rows, 32].

        Args:
            chunk: the panel's block that starts with the first of them.
            count: groups; all 8 of a block where it has 8.
            x: the first row's block of the first group.
            row_tiles: rows / 16.
            ahead: see ``dots.quantized_product``.
            target: float32.
        """
        builder = self._builder
        with cgutils.for_range(builder, count, intp=I64) as group:
            self._unpack(chunk, group.index, ahead)
        with cgutils.for_range(builder, row_tiles, intp=I64) as tile:
            first = builder.mul(tile.index, integer(AMX_ROWS))
            rows = builder.gep(x, [builder.mul(first, self._stride)])
            totals = builder.gep(target, [builder.mul(first, integer(PANEL))])
            for v in range(VECTORS):
                self._add_tile(chunk, count, rows, v, builder.gep(totals, [integer(v * LANES)]))

    def _places(self, chunk: Any, number: Any) -> tuple[Any, Any]:
        """Return where a group's block and the group itself start."""
        builder, layout = self._builder, self._layout
        header = integer(layout.header_bytes)
        if layout.groups == 1:
            block = builder.gep(chunk, [builder.mul(number, integer(layout.block_bytes))])
            return block, builder.gep(block, [header])
        offset = builder.add(header, builder.mul(number, integer(layout.group_bytes)))
        return chunk, builder.gep(chunk, [offset])

    def _unpack(self, chunk: Any, number: Any, ahead: Any) -> None:
        """Unpack a group's weights as signed bytes: outputs 0-15, then 16-31, by fours of inputs.

        Less the format's zero, all fit: those of eight bits are -128 to 127.
        """
        builder, layout = self._builder, self._layout
        block, group = self._places(chunk, number)
        fetch_ahead(builder, layout, block if layout.groups == 1 else group, ahead)
        quants = builder.gep(group, [integer(layout.integer_bytes)])
        to = builder.gep(self._weights, [builder.mul(number, integer(GROUP * PANEL))])
        kind = ir.VectorType(I8, LINE)
        weights = weights_of_fours(builder, layout, quants, integer(0), _FOURS)
        for number, packed in enumerate(weights):
            four, v = divmod(number, VECTORS)
            quants = builder.bitcast(packed, kind)
            if layout.zero:
                zero = ir.Constant(kind, [layout.zero - 256 * (layout.zero > 127)] * LINE)
                quants = builder.sub(quants, zero)
            at = integer((v * _FOURS + four) * LINE)
            store_unaligned(builder, quants, builder.gep(to, [at]))

    def _add_tile(self, chunk: Any, count: Any, rows: Any, v: int, target: Any) -> None:
        """Add the products of 16 rows with one half of the panel to target, rows 32 apart."""
        builder = self._builder
        for r, total in enumerate(self._totals):
            at = builder.gep(target, [integer(r * PANEL)])
            builder.store(load_unaligned(builder, at, F32_VECTOR), total)
        self._multiply(integer(0), rows, v)
        with cgutils.for_range(builder, count, intp=I64) as group:
            # Nothing below needs the next group's integers: the chip computes them meanwhile.
            following = builder.add(group.index, integer(1))
            with builder.if_then(builder.icmp_signed("<", following, count)):
                self._multiply(following, rows, v)
            self._scale(chunk, group.index, rows, v)
        for r, total in enumerate(self._totals):
            at = builder.gep(target, [integer(r * PANEL)])
            store_unaligned(builder, builder.load(total), at)

    def _sums_of(self, number: Any, part: int) -> Any:
        """Return where a group's sums are kept: two groups take turns."""
        builder = self._builder
        turn = builder.mul(builder.and_(number, integer(1)), integer(2 * _TILE_BYTES))
        return builder.gep(self._sums, [builder.add(turn, integer(part * _TILE_BYTES))])

    def _multiply(self, number: Any, rows: Any, v: int) -> None:
        """Compute the integer sums of a group: 16 rows, one half of the panel."""
        builder, inputs = self._builder, self._layout.scaled_inputs
        x_tile, weight_tile = _OPERAND_TILES[inputs]
        x = builder.gep(rows, [builder.mul(number, integer(ACTIVATION_BLOCK_BYTES))])
        weights = builder.gep(self._weights, [builder.mul(number, integer(GROUP * PANEL))])
        for part in range(GROUP // inputs):
            weights_at = integer((v * _FOURS + part * inputs // 4) * LINE)
            _amx(builder, "tilezero", _SUMS_TILE)
            x_at = builder.gep(x, [integer(part * inputs)])
            _amx(builder, "tileloadd64", x_tile, x_at, self._stride)
            at = builder.gep(weights, [weights_at])
            _amx(builder, "tileloadd64", weight_tile, at, integer(LINE))
            _amx(builder, "tdpbssd", _SUMS_TILE, x_tile, weight_tile)
            sums = self._sums_of(number, part)
            _amx(builder, "tilestored64", _SUMS_TILE, sums, integer(LINE))

    def _scale(self, chunk: Any, number: Any, rows: Any, v: int) -> None:
        """Scale a group's sums and add them to the totals, as dots.py does."""
        builder, layout = self._builder, self._layout
        places = (self._context, builder, layout, *self._places(chunk, number))
        x = builder.gep(rows, [builder.mul(number, integer(ACTIVATION_BLOCK_BYTES))])
        for part in range(GROUP // layout.scaled_inputs):
            scale = load_factor(*places, 0, part, v)
            minimum = load_factor(*places, 1, layout.scales, v) if layout.has_minima else None
            sums = self._sums_of(number, part)
            for r, held in enumerate(self._totals):
                x_block = builder.gep(x, [builder.mul(self._stride, integer(r))])
                x_scale = broadcast(builder, load_as(builder, x_block, integer(SCALE), F32))
                at = builder.gep(sums, [integer(r * LINE)])
                product = builder.sitofp(load_unaligned(builder, at, I32_VECTOR), F32_VECTOR)
                total = fused_multiply_add(
                    builder, product, builder.fmul(scale, x_scale), builder.load(held)
                )
                if minimum is not None:
                    x_sum = broadcast(builder, load_as(builder, x_block, integer(SCALED_SUM), F32))
                    total = fused_multiply_add(builder, minimum, x_sum, total)
                builder.store(total, held)


def amx_product(weight_format: WeightFormat) -> Any:
    """Generate the product of rows with panels of one format on AMX."""
    layout = LAYOUTS[weight_format]

    @generated(types.void, OWN, INDEX, INDEX, INDEX, INDEX, OWN, INDEX, INDEX, OWN, INDEX, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute tile[rows, 32] = rows of activation blocks @ a packed panel.

        Tile registers must be configured. Generates nothing where the chip has no AMX: a product's
        tile rows then never reach 16, see ``runners.cpu.autotune``.

        Args:
            x: uint8, activation blocks; rows are x_stride bytes apart, from x_offset on.
            rows: a multiple of 16.
            groups: of 32 inputs per row; a multiple of the format's groups per block.
            panel: uint8, the panel starts at panel_offset.
            ahead: see ``dots.quantized_product``.
            tile: float32, [rows, 32] at tile_offset, and SCRATCH_FLOATS at scratch_offset.
        """
        if has_feature(context, AMX_FEATURE):
            _generate(context, builder, layout, kinds, arguments)

    return operation


def _generate(
    context: Any, builder: ir.IRBuilder, layout: BlockLayout, kinds: Any, arguments: Any
) -> None:
    """Generate the product's code, see ``amx_product``."""
    x, x_offset, x_stride, rows, groups, panel, panel_offset, ahead, tile, *places = arguments
    x_start = address(context, builder, kinds[0], x, x_offset)
    panel_start = address(context, builder, kinds[5], panel, panel_offset)
    target = address(context, builder, kinds[8], tile, places[0])
    scratch = builder.bitcast(address(context, builder, kinds[8], tile, places[1]), I8.as_pointer())
    vectors = builder.mul(rows, integer(VECTORS))
    with cgutils.for_range(builder, vectors, intp=I64) as vector:
        to = builder.gep(target, [builder.mul(vector.index, integer(LANES))])
        store_unaligned(builder, constant(0.0), to)
    products = _AmxProducts(context, builder, layout, x_stride, scratch)
    chunk_bytes = layout.block_bytes * _CHUNK // layout.groups
    chunks = builder.udiv(builder.add(groups, integer(_CHUNK - 1)), integer(_CHUNK))
    row_tiles = builder.udiv(rows, integer(AMX_ROWS))
    with cgutils.for_range(builder, chunks, intp=I64) as number:
        first = builder.mul(number.index, integer(_CHUNK))
        left = builder.sub(groups, first)
        short = builder.icmp_signed("<", left, integer(_CHUNK))
        count = builder.select(short, left, integer(_CHUNK))
        chunk = builder.gep(panel_start, [builder.mul(number.index, integer(chunk_bytes))])
        x_at = builder.mul(first, integer(ACTIVATION_BLOCK_BYTES))
        products.add_groups(chunk, count, builder.gep(x_start, [x_at]), row_tiles, ahead, target)
