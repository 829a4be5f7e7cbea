"""Products of experts' rows with weights in MXFP4, called where a mixture would call ``linear``.

That kernel, which every model needs, doesn't know this format: it takes time to compile.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.activations import Activations, block_at
from midfill.kernels.cpu.dots import quantized_product
from midfill.kernels.cpu.jit import entry_point, in_child, kernel_by_number
from midfill.kernels.cpu.linear import LinearOutput, LinearWeights, Tiling
from midfill.kernels.cpu.panel_blocks import fetched_bytes
from midfill.kernels.cpu.panel_products import MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.simd import LANES, add, load, store
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.tiles import PREFETCH
from midfill.kernels.cpu.weight_formats import GROUP, PANEL, WeightFormat, layout_of

_multiply_rows = kernel_by_number(
    {rows: quantized_product(rows, WeightFormat.MXFP4) for rows in (1, 2, 3, MAX_QUANTIZED_ROWS)}
)
_FETCHED_BYTES = fetched_bytes(layout_of(WeightFormat.MXFP4))


@in_child
@entry_point
def multiply_mxfp4(
    context: ThreadContext, x: Activations, x_at: int, weights: LinearWeights, layer: int,
    out: LinearOutput, tiling: Tiling,
) -> None:  # fmt: skip
    """Compute out = x @ W.T + b on one thread alone.

    Args:
        context: of that thread.
        x: the inputs [out.rows, weights.inputs], quantised.
        x_at: element of ``x`` at which the first row starts.
        weights: W in MXFP4, and b, of all layers; outputs are a multiple of 32.
        layer: whose to use.
        out: where the outputs go; they replace what is there.
        tiling: whether to prefetch, and the thread's memory. Tiles have up to 4 rows.
    """
    panels, inputs = weights.outputs // PANEL, weights.inputs
    stride, groups, products = block_at(inputs), inputs // GROUP, tiling.products
    prefetch: Any = np.int64(tiling.rows[PREFETCH])
    for panel in range(panels):
        number = layer * panels + panel
        panel_at, bias_at = weights.panels[number, 0], number * PANEL
        following = weights.panels[min(number + 1, len(weights.panels) - 1), 0] - panel_at
        ahead = -prefetch
        row = tile = 0
        while row < out.rows:
            count: Any = np.int64(min(out.rows - row, MAX_QUANTIZED_ROWS))
            _multiply_rows(
                count, x.quants, block_at(x_at + row * inputs), stride, groups, weights.packed,
                panel_at, ahead, products, tile * 0,
            )  # fmt: skip
            for r in range(count):
                target = (row + r) * out.stride + panel * PANEL
                for lane in range(0, PANEL, LANES):
                    bias = load(weights.bias, bias_at + lane)
                    store(out.values, target + lane, add(load(products, r * PANEL + lane), bias))
            row += count
            ahead = following + tile * _FETCHED_BYTES
            tile += 1
