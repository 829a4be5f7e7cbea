"""Linear layers over packed weights, shared among the threads panel by panel.

``linear`` and ``gated_linear`` are one phase each: every thread calls them, claims panels until
none is left, and returns without waiting. The caller ends the phase with a barrier.
"""

from typing import Any, NamedTuple

import numpy as np

from midfill.kernels.cpu.activations import Activations, block_at, quantize
from midfill.kernels.cpu.dots import (
    Q4_FETCHED,
    Q8_FETCHED,
    multiply_q4_1,
    multiply_q4_2,
    multiply_q4_3,
    multiply_q4_4,
    multiply_q8_1,
    multiply_q8_2,
    multiply_q8_3,
    multiply_q8_4,
)
from midfill.kernels.cpu.halves import half_to_float
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.matmul import (
    multiply_f32_1,
    multiply_f32_2,
    multiply_f32_3,
    multiply_f32_4,
    multiply_f32_5,
    multiply_f32_6,
    multiply_f32_7,
    multiply_f32_8,
)
from midfill.kernels.cpu.memory import Float32Array, Uint8Array
from midfill.kernels.cpu.packing import GROUP, PANEL, WeightFormat, block_bytes
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    float_at,
    fma,
    load,
    multiply,
    splat,
    store,
    subtract,
)
from midfill.kernels.cpu.thread_pool import ThreadContext, take_work
from midfill.kernels.cpu.tiles import MAX_TABLE_ROWS

Q4, Q8, DENSE = int(WeightFormat.Q4), int(WeightFormat.Q8), int(WeightFormat.F32)
_Q4_BLOCK = block_bytes(WeightFormat.Q4)
_Q8_BLOCK = block_bytes(WeightFormat.Q8)
_DENSE_BLOCK = block_bytes(WeightFormat.F32)

MAX_TILE_ROWS = 8
"""Maximum rows of a tile with float32 weights."""
MAX_QUANTIZED_ROWS = 4
"""Maximum rows of a tile with quantised weights."""

SILU, GELU_TANH = 0, 1


class LinearWeights(NamedTuple):
    """One linear layer of the model, for all decoder layers.

    Attributes:
        packed: uint8 [layers * layer_bytes], panels as of packing.py, one layer after the other.
        bias: float32 [layers * outputs]; zeros if the model has none. Behind a matrix whose
            outputs are no multiple of 32 (the head), padded to whole panels.
        format: WeightFormat.
        outputs, inputs: of one layer's matrix; inputs is a multiple of 32.
        layer_bytes: bytes of one layer's matrix.
    """

    packed: Uint8Array
    bias: Float32Array
    format: int
    outputs: int
    inputs: int
    layer_bytes: int


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
    """

    values: Float32Array
    rows: int
    stride: int
    residual: bool
    multiplier: float


class Tiling(NamedTuple):
    """How a product is cut into tiles, and memory for one.

    Attributes:
        rows: uint8 [49], see tiles.py.
        products: float32 [2 * 8 * 32], this thread's own.
    """

    rows: Uint8Array
    products: Float32Array


@kernel
def panel_bytes(weight_format: int, inputs: int) -> int:
    """Return the bytes of one panel with that many inputs."""
    if weight_format == Q4:
        return inputs // GROUP * _Q4_BLOCK
    if weight_format == Q8:
        return inputs // GROUP * _Q8_BLOCK
    return inputs // GROUP * _DENSE_BLOCK


@kernel
def _multiply_f32(
    x: Float32Array, at: int, stride: int, rows: int, packed: Uint8Array, panel_at: int,
    tile: Float32Array, tile_at: int,
) -> None:  # fmt: skip
    """Compute tile[rows, 32] = x[rows, stride] @ panel[stride, 32] for 1 to 8 rows."""
    if rows == 8:
        multiply_f32_8(x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)
    elif rows == 1:
        multiply_f32_1(x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)
    elif rows == 2:
        multiply_f32_2(x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)
    elif rows == 3:
        multiply_f32_3(x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)
    elif rows == 4:
        multiply_f32_4(x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)
    elif rows == 5:
        multiply_f32_5(x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)
    elif rows == 6:
        multiply_f32_6(x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)
    else:
        multiply_f32_7(x, at, stride, stride, packed, panel_at, PANEL, tile, tile_at)


@kernel
def _multiply_q4(
    x: Uint8Array, at: int, stride: int, rows: int, groups: int, packed: Uint8Array,
    panel_at: int, ahead: int, tile: Float32Array, tile_at: int,
) -> None:  # fmt: skip
    """Compute tile[rows, 32] = rows of activation blocks @ a Q4 panel, for 1 to 4 rows."""
    if rows == 1:
        multiply_q4_1(x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)
    elif rows == 2:
        multiply_q4_2(x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)
    elif rows == 3:
        multiply_q4_3(x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)
    else:
        multiply_q4_4(x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)


@kernel
def _multiply_q8(
    x: Uint8Array, at: int, stride: int, rows: int, groups: int, packed: Uint8Array,
    panel_at: int, ahead: int, tile: Float32Array, tile_at: int,
) -> None:  # fmt: skip
    """Compute tile[rows, 32] = rows of activation blocks @ a Q8 panel, for 1 to 4 rows."""
    if rows == 1:
        multiply_q8_1(x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)
    elif rows == 2:
        multiply_q8_2(x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)
    elif rows == 3:
        multiply_q8_3(x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)
    else:
        multiply_q8_4(x, at, stride, groups, packed, panel_at, ahead, tile, tile_at)


@inlined_kernel
def _multiply_panel(
    x: Activations, at: int, rows: int, weights: LinearWeights, panel_at: int, number: int,
    tile: Float32Array, tile_at: int,
) -> None:  # fmt: skip
    """Compute tile[rows, 32] = x[rows, inputs] @ one panel.

    Args:
        x: quantised weights take the blocks, float32 weights the values.
        at: element at which the first of these rows starts.
        rows: of the tile.
        weights: all panels.
        panel_at: byte at which the panel starts.
        number: of the tile, see ``_prefetch_distance``.
        tile: float32, [rows, 32] at tile_at.
    """
    inputs, packed = weights.inputs, weights.packed
    if weights.format == DENSE:
        _multiply_f32(x.values, at, inputs, rows, packed, panel_at, tile, tile_at)
        return
    block, stride, groups = block_at(at), block_at(inputs), inputs // GROUP
    ahead = _prefetch_distance(number, groups, weights.format)
    if weights.format == Q4:
        _multiply_q4(x.quants, block, stride, rows, groups, packed, panel_at, ahead, tile, tile_at)
    else:
        _multiply_q8(x.quants, block, stride, rows, groups, packed, panel_at, ahead, tile, tile_at)


@kernel
def _prefetch_distance(number: int, groups: int, weight_format: int) -> int:
    """Return how many bytes ahead of a panel its tile of that number prefetches weights.

    The first tile reads the panel from memory, those after it from the cache. They would leave
    memory idle, so the three tiles after the first prefetch a third of the next panel each.
    """
    if number == 0:
        return 0
    if weight_format == Q4:
        return groups * _Q4_BLOCK + (number - 1) * Q4_FETCHED
    return groups * _Q8_BLOCK + (number - 1) * Q8_FETCHED


@kernel
def _panels_per_claim(panels: int, threads: int) -> int:
    """Return how many panels to claim at once: long runs stream well, short ones balance load."""
    return max(1, panels // (threads * 4))


@kernel
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
    size = panel_bytes(weights.format, weights.inputs)
    weights_at, bias_at = layer * weights.layer_bytes, layer * weights.outputs
    claim = _panels_per_claim(panels, context.threads)
    products = tiling.products
    top: Any = np.int64(0)  # a literal would be a type of its own, and be compiled for again
    while True:
        first = take_work(context.sync, claim)
        if first >= panels:
            break
        for panel in range(first, min(first + claim, panels)):
            row = number = 0
            while row < out.rows:
                count: Any = np.int64(tiling.rows[min(out.rows - row, MAX_TABLE_ROWS)])
                at = x_at + row * weights.inputs
                panel_at = weights_at + panel * size
                _multiply_panel(x, at, count, weights, panel_at, number, products, top)
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


@kernel
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
        out: [rows, outputs], quantised too.
        tiling: how to cut the rows, and this thread's memory.
    """
    gate, up = weights.gate, weights.up
    panels = up.outputs // PANEL
    gate_size = panel_bytes(gate.format, gate.inputs)
    up_size = panel_bytes(up.format, up.inputs)
    gate_at, up_at = layer * gate.layer_bytes, layer * up.layer_bytes
    bias_at = layer * up.outputs
    claim = _panels_per_claim(panels, context.threads)
    products = tiling.products
    top: Any = np.int64(0)  # a literal would be a type of its own, and be compiled for again
    up_tile: Any = np.int64(MAX_TILE_ROWS * PANEL)
    while True:
        first = take_work(context.sync, claim)
        if first >= panels:
            break
        for panel in range(first, min(first + claim, panels)):
            row = number = 0
            while row < rows:
                count: Any = np.int64(tiling.rows[min(rows - row, MAX_TABLE_ROWS)])
                at = x_at + row * up.inputs
                if weights.gated:
                    panel_at = gate_at + panel * gate_size
                    _multiply_panel(x, at, count, gate, panel_at, number, products, top)
                panel_at = up_at + panel * up_size
                _multiply_panel(x, at, count, up, panel_at, number, products, up_tile)
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
                        store(out.values, target + lane, value)
                    quantize(out, target, PANEL)
                row += count
                number += 1


@kernel
def embed(
    token: int, weights: LinearWeights, multiplier: float, out: Float32Array, out_at: int
) -> None:
    """Look up a token: out[out_at + k] = multiplier * weight of output ``token`` and input k."""
    panel, lane = token // PANEL, token % PANEL
    packed, inputs = weights.packed, weights.inputs
    base = panel * panel_bytes(weights.format, inputs)
    half = PANEL // 2
    for group in range(inputs // GROUP):
        if weights.format == DENSE:
            block = base + group * _DENSE_BLOCK
            for k in range(GROUP):
                value = float_at(packed, block + (k * PANEL + lane) * 4)
                out[out_at + group * GROUP + k] = value * multiplier
            continue
        block = base + group * (_Q4_BLOCK if weights.format == Q4 else _Q8_BLOCK)
        scale = half_to_float(packed, block + lane * 2)
        minimum = half_to_float(packed, block + (PANEL + lane) * 2)
        quants = block + 2 * PANEL * 2
        for k in range(GROUP):
            four, i = k // 4, k % 4
            if weights.format == Q4:
                byte = packed[quants + (four * half + lane % half) * 4 + i]
                quant = (byte >> 4) if lane >= half else (byte & 15)
            else:
                quant = np.int64(packed[quants + (four * PANEL + lane) * 4 + i]) - 128
            out[out_at + group * GROUP + k] = (quant * scale + minimum) * multiplier
