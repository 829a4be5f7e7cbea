"""Float32 products over panels: tile[r, 0:32] = sum over k of x[r, k] * w[k, 0:32].

A panel is 32 output features of a weight matrix with all inputs k, stored so that the 32 outputs
of one k lie side by side (see packing.py). Vector lanes run over outputs, and every output sums
over k from first to last with fused multiply-adds. So a row has the same bits in a tile of 1 row
or of 8. Panels of quants are multiplied in dots.py.

The functions are generated as LLVM IR: a tile's accumulators must stay in registers, which no
loop over a Numba array achieves.
"""

from typing import Any

from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import kernel_by_number
from midfill.kernels.cpu.simd import (
    F32,
    F32_VECTOR,
    I64,
    LANES,
    Sums,
    address,
    broadcast,
    integer,
    load_unaligned,
    row_pointers,
)
from midfill.kernels.cpu.weight_formats import PANEL

VECTORS = PANEL // LANES


def _multiply_floats(rows: int) -> Any:
    """Generate the kernel for ``rows`` rows and a float32 panel."""

    @generated(types.void, OWN, INDEX, INDEX, INDEX, OWN, INDEX, INDEX, OWN, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute tile[rows, 32] = x[rows, count] @ panel[count, 32].

        Args:
            x: float32, rows x_stride apart, from x_offset on.
            count: inputs.
            panel: float32 or uint8, from element panel_offset on; panel_stride floats per input.
            tile: float32, [rows, 32] at tile_offset.
        """
        x, x_offset, x_stride, count, panel, panel_offset, panel_stride, tile, at = arguments
        x_pointer = address(context, builder, kinds[0], x, x_offset)
        panel_pointer = builder.bitcast(
            address(context, builder, kinds[4], panel, panel_offset), F32.as_pointer()
        )
        x_rows = row_pointers(builder, x_pointer, x_stride, rows)
        sums = Sums(builder, rows, VECTORS)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            row = builder.gep(panel_pointer, [builder.mul(loop.index, panel_stride)])
            weights = [
                load_unaligned(builder, builder.gep(row, [integer(v * LANES)]), F32_VECTOR)
                for v in range(VECTORS)
            ]
            for r, x_row in enumerate(x_rows):
                value = broadcast(builder, builder.load(builder.gep(x_row, [loop.index])))
                for v, weight in enumerate(weights):
                    sums.add(r, v, value, weight)
        start = address(context, builder, kinds[7], tile, at)
        sums.write(row_pointers(builder, start, integer(PANEL), rows))

    return operation


multiply_floats = kernel_by_number(
    {rows: _multiply_floats(rows) for rows in (8, 1, 2, 3, 4, 5, 6, 7)}
)
