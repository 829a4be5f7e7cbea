"""Products of some rows with one panel, of any format: one kernel for each format and height.

Up to 4 rows of quants are multiplied in dots.py, 16 and more on AMX where the chip has it. The
kernels of quants are inlined: called, they take 4% longer in prefill.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.amx_products import AMX_ROWS, amx_product
from midfill.kernels.cpu.dots import quantized_product
from midfill.kernels.cpu.jit import inlined_kernel, kernel, kernel_by_number, optimized_first
from midfill.kernels.cpu.matmul import multiply_floats
from midfill.kernels.cpu.memory import Float32Array, Uint8Array
from midfill.kernels.cpu.panel_blocks import fetched_bytes
from midfill.kernels.cpu.weight_formats import (
    LAYOUTS,
    PANEL,
    WeightFormat,
)

MAX_QUANTIZED_ROWS = 4
"""Maximum rows of a tile with quantised weights, but for those on AMX."""
MAX_AMX_ROWS = 3 * AMX_ROWS
"""Maximum rows of a tile on AMX: weights are unpacked once for all of them."""
SCRATCH_AT = 2 * MAX_AMX_ROWS * PANEL
"""Element of a thread's ``Tiling.products`` from which on products on AMX have their memory."""


@optimized_first
@kernel
def multiply_f32(
    x: Float32Array, at: int, stride: int, rows: int, packed: Uint8Array, panel_at: int,
    tile: Float32Array, tile_at: int,
) -> None:  # fmt: skip
    """Compute tile[rows, 32] = x[rows, stride] @ panel[stride, 32] for 1 to 8 rows."""
    multiply_floats(rows, x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)


def _quantized_kernel(weight_format: WeightFormat) -> Any:
    """Return the kernel that multiplies rows by a panel of one format."""
    multiply_rows = kernel_by_number(
        {rows: quantized_product(rows, weight_format) for rows in (1, 2, 3, MAX_QUANTIZED_ROWS)}
    )
    multiply_on_amx = amx_product(weight_format)

    @optimized_first
    @inlined_kernel
    def multiply(
        x: Uint8Array, at: int, stride: int, rows: int, groups: int, packed: Uint8Array,
        panel_at: int, ahead: int, tile: Float32Array, tile_at: int,
    ) -> None:  # fmt: skip
        """Compute tile[rows, 32] = activation blocks @ a panel, for 1 to 4 rows, or on AMX."""
        if rows <= MAX_QUANTIZED_ROWS:
            multiply_rows(rows, x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)
        else:
            multiply_on_amx(
                x, at, stride, rows, groups, packed, panel_at, ahead, tile, tile_at, SCRATCH_AT
            )

    return multiply


_COMMON = (WeightFormat.Q4_1, WeightFormat.Q8_0, WeightFormat.Q4_K, WeightFormat.Q6_K)
_multiply_in_format = kernel_by_number(
    {int(each): _quantized_kernel(each) for each in dict.fromkeys((*_COMMON, *LAYOUTS))}
)


@optimized_first
@inlined_kernel
def multiply_quants(
    x: Uint8Array, at: int, stride: int, rows: int, groups: int, packed: Uint8Array,
    panel_at: int, weight_format: int, ahead: int, tile: Float32Array, tile_at: int,
) -> None:  # fmt: skip
    """Compute tile[rows, 32] = rows of activation blocks @ a panel of any quantised format."""
    _multiply_in_format(
        weight_format, x, at, stride, rows, groups, packed, panel_at, ahead, tile, tile_at
    )


_FETCHED_BYTES = np.array([fetched_bytes(layout) for layout in LAYOUTS.values()])


@kernel
def prefetch_distance(number: int, prefetch: int, following: int, weight_format: int) -> int:
    """Return how many bytes ahead of a panel its tile of that number prefetches weights.

    The first tile reads the panel from memory, those after it from the cache. They would leave
    memory idle, so the three tiles after the first prefetch a third of the next panel each.

    Args:
        number: of the tile.
        prefetch: a ``Prefetch``; the first tile's is returned negated.
        following: bytes from the panel to the one that the thread multiplies by next.
        weight_format: of the panel.
    """
    if number == 0:
        return -prefetch
    return following + (number - 1) * _FETCHED_BYTES[weight_format]
