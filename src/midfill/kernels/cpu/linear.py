"""Linear layers over packed weights, shared among the threads panel by panel.

``linear`` and ``gated_linear`` are one phase each: every thread calls them, takes runs of panels
until none is left (work_stealing.py), and returns without waiting. The caller ends the phase with
a barrier.
"""

from typing import Any, NamedTuple

import numpy as np

from midfill.kernels.cpu.activations import Activations, block_at, quantize_groups
from midfill.kernels.cpu.amx_products import (
    AMX_ROWS,
    SCRATCH_FLOATS,
    configure_amx,
    release_amx,
)
from midfill.kernels.cpu.argmax import update_argmax
from midfill.kernels.cpu.jit import (
    entry_point,
    in_child,
    inlined_kernel,
    kernel,
    optimized_first,
)
from midfill.kernels.cpu.memory import Float32Array, Int64Array, Uint8Array
from midfill.kernels.cpu.panel_products import (
    MAX_AMX_ROWS,
    SCRATCH_AT,
    multiply_f32,
    multiply_quants,
    prefetch_distance,
)
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    fma,
    load,
    multiply,
    splat,
    store,
    subtract,
)
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.tiles import MAX_TABLE_ROWS, PREFETCH
from midfill.kernels.cpu.weight_formats import GROUP, PANEL, WeightFormat, panel_bytes
from midfill.kernels.cpu.work_stealing import next_run

_F32 = int(WeightFormat.F32)

MAX_TILE_ROWS = 8
"""Maximum rows of a tile with float32 weights."""
PRODUCTS_SIZE = SCRATCH_AT + SCRATCH_FLOATS
"""Length of ``Tiling.products``: two tiles, and memory for products on AMX."""

SILU, GELU_TANH = 0, 1


class LinearWeights(NamedTuple):
    """One linear layer of the model, for all decoder layers.

    Attributes:
        packed: uint8, panels as of weight_formats.py, one layer after the other; those of gate and
            up lie side by side in one array.
        panels: int64 [layers * panels, 2], the first byte and the WeightFormat of each.
        bias: float32 [layers * outputs]; zeros if the model has none. Behind a matrix whose
            outputs are no multiple of 32 (the head), padded to whole panels.
        outputs, inputs: of one layer's matrix; inputs is a multiple of 32.
    """

    packed: Uint8Array
    panels: Int64Array
    bias: Float32Array
    outputs: int
    inputs: int

    @property
    def formats(self) -> set[WeightFormat]:
        """The formats of its panels."""
        return {WeightFormat(number) for number in np.unique(self.panels[:, 1])}

    @property
    def stored_bytes(self) -> int:
        """Bytes of its panels; ``packed`` may hold another matrix's too."""
        numbers, counts = np.unique(self.panels[:, 1], return_counts=True)
        pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
        return sum(panel_bytes(WeightFormat(n), self.inputs) * count for n, count in pairs)


class GateUpWeights(NamedTuple):
    """The first half of an MLP.

    Attributes:
        gate: unused where not ``gated``.
        up: with as many outputs, a multiple of 32.
        activation: SILU or GELU_TANH.
        gated: whether the MLP has a gate.
    """

    gate: LinearWeights
    up: LinearWeights
    activation: int
    gated: bool


class LinearOutput(NamedTuple):
    """Where a linear layer's outputs go.

    Attributes:
        values: float32 [rows * stride].
        rows: rows to compute.
        stride: elements from one row to the next, at least the outputs padded to whole panels.
        residual: add multiplier * outputs to what is there, instead of replacing it.
        multiplier: used where ``residual``.
        maxima: float32 [rows * 48], this thread's own, see argmax.py; used where ``finds_argmax``.
        finds_argmax: look for each row's largest output, where outputs are not added.
    """

    values: Float32Array
    rows: int
    stride: int
    residual: bool
    multiplier: float
    maxima: Float32Array
    finds_argmax: bool


class Tiling(NamedTuple):
    """How a product is cut into tiles, and memory for one.

    Attributes:
        rows: uint8 [49], see tiles.py.
        products: float32 [PRODUCTS_SIZE], this thread's own.
    """

    rows: Uint8Array
    products: Float32Array


@optimized_first
@inlined_kernel
def _multiply_panel(
    x: Activations, at: int, rows: int, weights: LinearWeights, panel: int, number: int,
    prefetch: int, tile: Float32Array, tile_at: int,
) -> None:  # fmt: skip
    """Compute tile[rows, 32] = x[rows, inputs] @ one panel.

    Args:
        x: quantised weights take the blocks, float32 weights the values.
        at: element at which the first of these rows starts.
        rows: of the tile.
        weights: all panels.
        panel: its number, counted from the first layer's first.
        number, prefetch: of the tile, see ``prefetch_distance``.
        tile: float32, [rows, 32] at tile_at.
    """
    inputs, packed = weights.inputs, weights.packed
    panel_at, weight_format = weights.panels[panel, 0], weights.panels[panel, 1]
    if weight_format == _F32:
        multiply_f32(x.values, at, inputs, rows, packed, panel_at, tile, tile_at)
        return
    block, stride, groups = block_at(at), block_at(inputs), inputs // GROUP
    following = weights.panels[min(panel + 1, len(weights.panels) - 1), 0] - panel_at
    ahead = prefetch_distance(number, prefetch, following, weight_format)
    multiply_quants(
        x.quants, block, stride, rows, groups, packed, panel_at, weight_format, ahead, tile,
        tile_at,
    )  # fmt: skip


@in_child
@entry_point
def linear(
    context: ThreadContext, x: Activations, x_at: int, weights: LinearWeights, layer: int,
    out: LinearOutput, tiling: Tiling,
) -> None:  # fmt: skip
    """Compute out = x @ W.T + b, or add it to ``out`` where that is a residual.

    Args:
        context: this thread.
        x: the inputs, [out.rows, weights.inputs].
        x_at: element of ``x`` at which the first row starts.
        weights: W and b of all layers.
        layer: whose to use.
        out: where the outputs go.
        tiling: how to cut the rows, and this thread's memory.
    """
    panels = (weights.outputs + PANEL - 1) // PANEL
    first_panel, bias_at = layer * panels, layer * weights.outputs
    products = tiling.products
    prefetch: Any = np.int64(tiling.rows[PREFETCH])
    on_amx = False
    turn = 0
    while True:
        first, end = next_run(context, turn, panels)
        if first >= panels:
            break
        turn += 1
        for panel in range(first, end):
            row = number = 0
            while row < out.rows:
                count: Any = np.int64(tiling.rows[min(out.rows - row, MAX_TABLE_ROWS)])
                if count >= AMX_ROWS and not on_amx:
                    configure_amx()
                    on_amx = True
                at = x_at + row * weights.inputs
                _multiply_panel(
                    x, at, count, weights, first_panel + panel, number, prefetch, products, 0
                )
                for r in range(count):
                    for lane in range(0, PANEL, LANES):
                        column = panel * PANEL + lane
                        target = (row + r) * out.stride + column
                        bias = load(weights.bias, bias_at + column)
                        value = add(load(products, r * PANEL + lane), bias)
                        if out.residual:
                            value = fma(splat(out.multiplier), value, load(out.values, target))
                        store(out.values, target, value)
                row += count
                number += 1
        if out.finds_argmax:  # of what this thread has just written
            columns = min(end * PANEL, weights.outputs)
            for r in range(out.rows):
                update_argmax(out.values, r * out.stride, first * PANEL, columns, out.maxima, r)
    if on_amx:
        release_amx()


@kernel
def activate(x: Any, kind: int) -> Any:
    """Apply the MLP's activation to a vector: SiLU, or GELU in its tanh form."""
    one = splat(1.0)
    if kind == SILU:
        return divide(x, add(one, exp(subtract(splat(0.0), x))))
    # tanh(u) = 1 - 2 / (exp(2u) + 1), and 0.5 * (1 + tanh(u)) = 1 - 1 / (exp(2u) + 1)
    cubic = multiply(multiply(multiply(x, x), x), splat(0.044715))
    u = multiply(splat(0.7978845608028654), add(x, cubic))
    return multiply(x, subtract(one, divide(one, add(exp(add(u, u)), one))))


@in_child
@entry_point
def gated_linear(
    context: ThreadContext, x: Activations, x_at: int, rows: int, weights: GateUpWeights,
    layer: int, out: Activations, tiling: Tiling,
) -> None:  # fmt: skip
    """Compute out = act(x @ G.T + g) * (x @ U.T + u), or act(x @ U.T + u) where not gated.

    Args:
        context: this thread.
        x: the inputs, [rows, inputs].
        x_at: element of ``x`` at which the first row starts.
        rows: rows to compute.
        weights: G, g, U, u of all layers.
        layer: whose to use.
        out: [rows, outputs], quantised too; its values may be left out.
        tiling: how to cut the rows, and this thread's memory.
    """
    gate, up = weights.gate, weights.up
    panels = up.outputs // PANEL
    first_panel, bias_at = layer * panels, layer * up.outputs
    products, up_tile = tiling.products, MAX_AMX_ROWS * PANEL
    prefetch: Any = np.int64(tiling.rows[PREFETCH])
    first_half = 0 if weights.gated else 1
    on_amx = False
    turn = 0
    while True:
        first, end = next_run(context, turn, panels)
        if first >= panels:
            break
        turn += 1
        for panel in range(first, end):
            row = number = 0
            while row < rows:
                count: Any = np.int64(tiling.rows[min(rows - row, MAX_TABLE_ROWS)])
                if count >= AMX_ROWS and not on_amx:
                    configure_amx()
                    on_amx = True
                at = x_at + row * up.inputs
                for half in range(first_half, 2):
                    _multiply_panel(
                        x, at, count, gate if half == 0 else up, first_panel + panel, number,
                        prefetch, products, half * up_tile,
                    )  # fmt: skip
                for r in range(count):
                    target = (row + r) * up.outputs + panel * PANEL
                    for lane in range(0, PANEL, LANES):
                        column, product = bias_at + panel * PANEL + lane, r * PANEL + lane
                        value = add(load(products, up_tile + product), load(up.bias, column))
                        if weights.gated:
                            opened = add(load(products, product), load(gate.bias, column))
                            value = multiply(activate(opened, weights.activation), value)
                        else:
                            value = activate(value, weights.activation)
                        store(products, up_tile + product, value)
                        if len(out.values) > 0:
                            store(out.values, target + lane, value)
                if len(out.quants) > 0:
                    block = block_at(row * up.outputs + panel * PANEL)
                    quantize_groups(
                        products, up_tile, PANEL, count, out.quants, block, block_at(up.outputs)
                    )
                row += count
                number += 1
    if on_amx:
        release_amx()
