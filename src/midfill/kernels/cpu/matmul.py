"""Matrix kernels over panels: tile[r, 0:32] = sum over k of x[r, k] * w[k, 0:32].

A panel is 32 output features of a weight matrix, all its inputs k, laid out so that the 32
outputs of one k lie side by side (see packing.py). Vector lanes run over outputs and every
output sums over k from first to last with fused multiply-adds, so a row's result is the same bit
for bit in a tile of 1 row or of 8, from packed codes or from a panel dequantised before.

The functions are generated as LLVM IR: the accumulators of a tile must stay in registers, which
no loop over a Numba array achieves.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from midfill.kernels.cpu.halves import load_halves
from midfill.kernels.cpu.packing import GROUP, HEADER_BYTES, PANEL, WeightFormat, block_bytes
from midfill.kernels.cpu.simd import (
    F32,
    F32_VECTOR,
    I8,
    I32_VECTOR,
    I64,
    LANES,
    Codegen,
    address,
    broadcast,
    constant,
    fused_multiply_add,
    load_unaligned,
    store_unaligned,
)

VECTORS = PANEL // LANES
I8_VECTOR = ir.VectorType(I8, LANES)


def _integer(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _block_header(context: Any, builder: ir.IRBuilder, block: Any) -> tuple[list[Any], list[Any]]:
    """Scale and minimum vectors of one block, float16 in memory."""
    scales: list[Any] = []
    minima: list[Any] = []
    for v in range(VECTORS):
        for values, start in ((scales, 0), (minima, HEADER_BYTES // 2)):
            pointer = builder.gep(block, [_integer(start + v * LANES * 2)])
            values.append(load_halves(context, builder, pointer))
    return scales, minima


def _codes(builder: ir.IRBuilder, weight_format: WeightFormat, pointer: Any) -> list[Any]:
    """The 32 codes of one k as float32 vectors."""
    if weight_format is WeightFormat.Q4:
        packed = builder.zext(load_unaligned(builder, pointer, I8_VECTOR), I32_VECTOR)
        low = builder.and_(packed, ir.Constant(I32_VECTOR, [15] * LANES))
        high = builder.lshr(packed, ir.Constant(I32_VECTOR, [4] * LANES))
        return [builder.sitofp(codes, F32_VECTOR) for codes in (low, high)]
    vectors = []
    for v in range(VECTORS):
        codes = load_unaligned(builder, builder.gep(pointer, [_integer(v * LANES)]), I8_VECTOR)
        vectors.append(builder.sitofp(builder.sext(codes, I32_VECTOR), F32_VECTOR))
    return vectors


def _code_bytes(weight_format: WeightFormat) -> int:
    """Bytes of the 32 codes of one k."""
    return PANEL // 2 if weight_format is WeightFormat.Q4 else PANEL


def _for_each_weight(
    context: Any,
    builder: ir.IRBuilder,
    weight_format: WeightFormat,
    panel: Any,
    groups: Any,
    body: Callable[[Any, list[Any]], None],
) -> None:
    """Loop over a quantised panel; ``body(k, weights)`` gets the vectors of each k in order."""
    with cgutils.for_range(builder, groups, intp=I64) as group:
        offset = builder.mul(group.index, _integer(block_bytes(weight_format)))
        block = builder.gep(panel, [offset])
        scales, minima = _block_header(context, builder, block)
        first = builder.mul(group.index, _integer(GROUP))
        codes_start = builder.gep(block, [_integer(HEADER_BYTES)])
        with cgutils.for_range(builder, _integer(GROUP), intp=I64) as inner:
            row = builder.mul(inner.index, _integer(_code_bytes(weight_format)))
            codes = _codes(builder, weight_format, builder.gep(codes_start, [row]))
            weights = [
                fused_multiply_add(builder, codes[v], scales[v], minima[v]) for v in range(VECTORS)
            ]
            body(builder.add(first, inner.index), weights)


class _Accumulators:
    """rows x 32 sums in registers; x is [rows, k] with a row stride."""

    def __init__(self, builder: ir.IRBuilder, rows: int, x: Any, x_stride: Any) -> None:
        self._builder = builder
        self._cells = [
            [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(VECTORS)]
            for _ in range(rows)
        ]
        for row in self._cells:
            for cell in row:
                builder.store(constant(0.0), cell)
        self._x_rows = [builder.gep(x, [builder.mul(x_stride, _integer(r))]) for r in range(rows)]

    def add(self, k: Any, weights: list[Any]) -> None:
        builder = self._builder
        for x_row, cells in zip(self._x_rows, self._cells, strict=True):
            x = broadcast(builder, builder.load(builder.gep(x_row, [k])))
            for weight, cell in zip(weights, cells, strict=True):
                builder.store(fused_multiply_add(builder, x, weight, builder.load(cell)), cell)

    def write(self, tile: Any) -> None:
        builder = self._builder
        for r, cells in enumerate(self._cells):
            for v, cell in enumerate(cells):
                pointer = builder.gep(tile, [_integer(r * PANEL + v * LANES)])
                store_unaligned(builder, builder.load(cell), pointer)


def _multiply_floats(rows: int) -> Any:
    """Generate the kernel of ``rows`` rows for a float32 panel."""

    def operation(
        typing_context: Any,
        x: Any,
        x_offset: Any,
        x_stride: Any,
        count: Any,
        panel: Any,
        panel_offset: Any,
        panel_stride: Any,
        tile: Any,
        tile_offset: Any,
    ) -> tuple[Any, Codegen]:
        """tile[rows, 32] = x[rows, count] @ panel[count, 32].

        x: float32 at x_offset, rows x_stride apart. panel: float32 or uint8 array at
        panel_offset (in its elements), one k panel_stride floats after the other.
        """

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_offset, x_stride, count, panel, panel_offset, panel_stride, tile, at = arguments
            kinds = signature.args
            x_pointer = address(context, builder, kinds[0], x, x_offset)
            panel_pointer = builder.bitcast(
                address(context, builder, kinds[4], panel, panel_offset), F32.as_pointer()
            )
            sums = _Accumulators(builder, rows, x_pointer, x_stride)
            with cgutils.for_range(builder, count, intp=I64) as loop:
                row = builder.gep(panel_pointer, [builder.mul(loop.index, panel_stride)])
                weights = [
                    load_unaligned(builder, builder.gep(row, [_integer(v * LANES)]), F32_VECTOR)
                    for v in range(VECTORS)
                ]
                sums.add(loop.index, weights)
            sums.write(address(context, builder, kinds[7], tile, at))
            return context.get_dummy_value()

        index = types.intp
        signature = types.void(x, index, index, index, panel, index, index, tile, index)
        return signature, codegen

    return intrinsic(operation)


def _multiply_codes(rows: int, weight_format: WeightFormat) -> Any:
    """Generate the kernel of ``rows`` rows that dequantises the panel on the way."""

    def operation(
        typing_context: Any,
        x: Any,
        x_offset: Any,
        x_stride: Any,
        groups: Any,
        panel: Any,
        panel_offset: Any,
        tile: Any,
        tile_offset: Any,
    ) -> tuple[Any, Codegen]:
        """tile[rows, 32] = x[rows, groups * 32] @ dequantised panel (uint8 at panel_offset)."""

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_offset, x_stride, groups, panel, panel_offset, tile, at = arguments
            kinds = signature.args
            sums = _Accumulators(
                builder, rows, address(context, builder, kinds[0], x, x_offset), x_stride
            )
            panel_pointer = address(context, builder, kinds[4], panel, panel_offset)
            _for_each_weight(context, builder, weight_format, panel_pointer, groups, sums.add)
            sums.write(address(context, builder, kinds[6], tile, at))
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, index, panel, index, tile, index), codegen

    return intrinsic(operation)


def _dequantise(weight_format: WeightFormat) -> Any:
    """Generate the function that writes a packed panel as float32 [k, 32]."""

    def operation(
        typing_context: Any,
        groups: Any,
        panel: Any,
        panel_offset: Any,
        target: Any,
        target_offset: Any,
    ) -> tuple[Any, Codegen]:
        """target[k * 32 + n] = weight of input k and output n; float32."""

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            groups, panel, panel_offset, target, target_offset = arguments
            kinds = signature.args
            target_pointer = address(context, builder, kinds[3], target, target_offset)

            def write(k: Any, weights: list[Any]) -> None:
                row = builder.gep(target_pointer, [builder.mul(k, _integer(PANEL))])
                for v, weight in enumerate(weights):
                    pointer = builder.gep(row, [_integer(v * LANES)])
                    store_unaligned(builder, weight, pointer)

            panel_pointer = address(context, builder, kinds[1], panel, panel_offset)
            _for_each_weight(context, builder, weight_format, panel_pointer, groups, write)
            return context.get_dummy_value()

        index = types.intp
        return types.void(index, panel, index, target, index), codegen

    return intrinsic(operation)


multiply_f32_1 = _multiply_floats(1)
multiply_f32_2 = _multiply_floats(2)
multiply_f32_3 = _multiply_floats(3)
multiply_f32_4 = _multiply_floats(4)
multiply_f32_5 = _multiply_floats(5)
multiply_f32_6 = _multiply_floats(6)
multiply_f32_7 = _multiply_floats(7)
multiply_f32_8 = _multiply_floats(8)
multiply_q8_1 = _multiply_codes(1, WeightFormat.Q8)
multiply_q8_2 = _multiply_codes(2, WeightFormat.Q8)
multiply_q8_3 = _multiply_codes(3, WeightFormat.Q8)
multiply_q8_4 = _multiply_codes(4, WeightFormat.Q8)
multiply_q4_1 = _multiply_codes(1, WeightFormat.Q4)
multiply_q4_2 = _multiply_codes(2, WeightFormat.Q4)
multiply_q4_3 = _multiply_codes(3, WeightFormat.Q4)
multiply_q4_4 = _multiply_codes(4, WeightFormat.Q4)
dequantise_q8 = _dequantise(WeightFormat.Q8)
dequantise_q4 = _dequantise(WeightFormat.Q4)
