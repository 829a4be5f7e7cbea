"""Float32 products over panels: tile[r, 0:32] = sum over k of x[r, k] * w[k, 0:32].

A panel is 32 output features of a weight matrix with all inputs k, stored so that the 32 outputs
of one k lie side by side (see packing.py). Vector lanes run over outputs, and every output sums
over k from first to last with fused multiply-adds. So a row has the same bits in a tile of 1 row
or of 8. Panels of quants are multiplied in dots.py.

The functions are generated as LLVM IR: a tile's accumulators must stay in registers, which no
loop over a Numba array achieves.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from midfill.kernels.cpu.simd import (
    F32,
    F32_VECTOR,
    I8,
    I64,
    LANES,
    Codegen,
    address,
    broadcast,
    constant,
    fused_multiply_add,
    integer,
    load_unaligned,
    store_unaligned,
)
from midfill.kernels.cpu.weight_formats import PANEL

VECTORS = PANEL // LANES
I8_VECTOR = ir.VectorType(I8, LANES)


class _Accumulators:
    """rows x 32 sums in registers; x is [rows, k] with a row stride."""

    def __init__(self, builder: ir.IRBuilder, rows: int, x: Any, x_stride: Any) -> None:
        self._builder = builder
        self._sums = [
            [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(VECTORS)]
            for _ in range(rows)
        ]
        for row in self._sums:
            for total in row:
                builder.store(constant(0.0), total)
        self._x_rows = [builder.gep(x, [builder.mul(x_stride, integer(r))]) for r in range(rows)]

    def add(self, k: Any, weights: list[Any]) -> None:
        """Add the products of input k."""
        builder = self._builder
        for x_row, totals in zip(self._x_rows, self._sums, strict=True):
            x = broadcast(builder, builder.load(builder.gep(x_row, [k])))
            for weight, total in zip(weights, totals, strict=True):
                builder.store(fused_multiply_add(builder, x, weight, builder.load(total)), total)

    def write(self, tile: Any) -> None:
        """Store the sums to tile[rows, 32]."""
        builder = self._builder
        for r, totals in enumerate(self._sums):
            for v, total in enumerate(totals):
                pointer = builder.gep(tile, [integer(r * PANEL + v * LANES)])
                store_unaligned(builder, builder.load(total), pointer)


def _multiply_floats(rows: int) -> Any:
    """Generate the kernel for ``rows`` rows and a float32 panel."""

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
        """Compute tile[rows, 32] = x[rows, count] @ panel[count, 32].

        Args:
            x: float32, rows x_stride apart, from x_offset on.
            count: inputs.
            panel: float32 or uint8, from element panel_offset on; panel_stride floats per input.
            tile: float32, [rows, 32] at tile_offset.
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
                    load_unaligned(builder, builder.gep(row, [integer(v * LANES)]), F32_VECTOR)
                    for v in range(VECTORS)
                ]
                sums.add(loop.index, weights)
            sums.write(address(context, builder, kinds[7], tile, at))
            return context.get_dummy_value()

        index = types.intp
        signature = types.void(x, index, index, index, panel, index, index, tile, index)
        return signature, codegen

    return intrinsic(operation)


multiply_f32_1 = _multiply_floats(1)
multiply_f32_2 = _multiply_floats(2)
multiply_f32_3 = _multiply_floats(3)
multiply_f32_4 = _multiply_floats(4)
multiply_f32_5 = _multiply_floats(5)
multiply_f32_6 = _multiply_floats(6)
multiply_f32_7 = _multiply_floats(7)
multiply_f32_8 = _multiply_floats(8)
