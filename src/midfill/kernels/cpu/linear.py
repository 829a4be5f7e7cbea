"""Linear layers over packed rows, shared out among the team panel by panel.

Each function is one phase: every thread of the team calls it, claims panels until none is left,
and returns without waiting. The caller sets a barrier between phases.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.dots import (
    Q4_FETCHED,
    Q8_FETCHED,
    ROUNDED_BYTES,
    multiply_q4_1,
    multiply_q4_2,
    multiply_q4_3,
    multiply_q4_4,
    multiply_q8_1,
    multiply_q8_2,
    multiply_q8_3,
    multiply_q8_4,
    round_row,
)
from midfill.kernels.cpu.halves import half_to_float
from midfill.kernels.cpu.jit import kernel
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
from midfill.kernels.cpu.team import take_work
from midfill.kernels.cpu.tiles import PLANNED_ROWS

Q4, Q8, DENSE = int(WeightFormat.Q4), int(WeightFormat.Q8), int(WeightFormat.F32)
_Q4_BLOCK = block_bytes(WeightFormat.Q4)
_Q8_BLOCK = block_bytes(WeightFormat.Q8)
_DENSE_BLOCK = block_bytes(WeightFormat.F32)

MAX_TILE_ROWS = 8
MAX_CODE_ROWS = 4
"""Most rows a tile holds, of float32 and of codes."""

SILU, GELU_TANH = 0, 1


@kernel
def panel_bytes(weight_format: int, inputs: int) -> int:
    """Bytes of one panel with that many inputs."""
    if weight_format == Q4:
        return inputs // GROUP * _Q4_BLOCK
    if weight_format == Q8:
        return inputs // GROUP * _Q8_BLOCK
    return inputs // GROUP * _DENSE_BLOCK


@kernel
def multiply_floats(
    x: Any, at: int, stride: int, rows: int, count: int, panel: Any, panel_at: int,
    panel_stride: int, tile: Any, tile_at: int,
) -> None:  # fmt: skip
    """tile[rows, 32] = x[rows, count] @ panel[count, 32] for 1 to 8 rows."""
    if rows == 8:
        multiply_f32_8(x, at, stride, count, panel, panel_at, panel_stride, tile, tile_at)
    elif rows == 1:
        multiply_f32_1(x, at, stride, count, panel, panel_at, panel_stride, tile, tile_at)
    elif rows == 2:
        multiply_f32_2(x, at, stride, count, panel, panel_at, panel_stride, tile, tile_at)
    elif rows == 3:
        multiply_f32_3(x, at, stride, count, panel, panel_at, panel_stride, tile, tile_at)
    elif rows == 4:
        multiply_f32_4(x, at, stride, count, panel, panel_at, panel_stride, tile, tile_at)
    elif rows == 5:
        multiply_f32_5(x, at, stride, count, panel, panel_at, panel_stride, tile, tile_at)
    elif rows == 6:
        multiply_f32_6(x, at, stride, count, panel, panel_at, panel_stride, tile, tile_at)
    else:
        multiply_f32_7(x, at, stride, count, panel, panel_at, panel_stride, tile, tile_at)


@kernel
def _multiply_q4(
    x: Any, at: int, stride: int, rows: int, groups: int, panel: Any, panel_at: int,
    ahead: int, tile: Any, tile_at: int,
) -> None:  # fmt: skip
    if rows == 1:
        multiply_q4_1(x, at, stride, groups, panel, panel_at, ahead, tile, tile_at)
    elif rows == 2:
        multiply_q4_2(x, at, stride, groups, panel, panel_at, ahead, tile, tile_at)
    elif rows == 3:
        multiply_q4_3(x, at, stride, groups, panel, panel_at, ahead, tile, tile_at)
    else:
        multiply_q4_4(x, at, stride, groups, panel, panel_at, ahead, tile, tile_at)


@kernel
def _multiply_q8(
    x: Any, at: int, stride: int, rows: int, groups: int, panel: Any, panel_at: int,
    ahead: int, tile: Any, tile_at: int,
) -> None:  # fmt: skip
    if rows == 1:
        multiply_q8_1(x, at, stride, groups, panel, panel_at, ahead, tile, tile_at)
    elif rows == 2:
        multiply_q8_2(x, at, stride, groups, panel, panel_at, ahead, tile, tile_at)
    elif rows == 3:
        multiply_q8_3(x, at, stride, groups, panel, panel_at, ahead, tile, tile_at)
    else:
        multiply_q8_4(x, at, stride, groups, panel, panel_at, ahead, tile, tile_at)


@kernel
def rounded_at(at: int) -> int:
    """Byte at which the block of the 32 floats at ``at`` starts, in an array of blocks."""
    return at // GROUP * ROUNDED_BYTES


@kernel
def multiply_weights(
    x: Any, rounded: Any, at: int, inputs: int, rows: int, weights: Any, panel_at: int,
    weight_format: int, ahead: int, tile: Any, tile_at: int,
) -> None:  # fmt: skip
    """tile[rows, 32] = x[rows, inputs] @ one panel; codes take x as ``rounded`` blocks.

    ahead: see ``fetched_from``.
    """
    if weight_format == DENSE:
        multiply_floats(x, at, inputs, rows, inputs, weights, panel_at, PANEL, tile, tile_at)
        return
    block, stride, groups = rounded_at(at), rounded_at(inputs), inputs // GROUP
    if weight_format == Q4:
        _multiply_q4(rounded, block, stride, rows, groups, weights, panel_at, ahead, tile, tile_at)
    else:
        _multiply_q8(rounded, block, stride, rows, groups, weights, panel_at, ahead, tile, tile_at)


@kernel
def _work_share(panels: int, threads: int) -> int:
    """Panels to claim at once: long runs stream well, small ones even out a busy core."""
    return max(1, panels // (threads * 4))


@kernel
def fetched_from(number: int, size: int, weight_format: int) -> int:
    """How many bytes from a panel's blocks on its tile of that number fetches weights.

    The first tile reads the panel from memory and those after it find it in the cache. They would
    leave memory idle, so they fetch the next panel: the three after the first a third each.
    """
    if number == 0:
        return 0
    part = Q4_FETCHED if weight_format == Q4 else Q8_FETCHED
    return size + (number - 1) * part


@kernel
def linear(
    sync: Any, threads: int, x: Any, rounded: Any, x_at: int, rows: int, inputs: int,
    weights: Any, weights_at: int, weight_format: int, outputs: int, bias: Any, bias_at: int,
    out: Any, out_stride: int, residual: bool, multiplier: float, heights: Any, tile: Any,
) -> None:  # fmt: skip
    """out = x @ W.T + b, or out += multiplier * (x @ W.T + b) where ``residual``.

    x: float32 [rows, inputs] at x_at. rounded: uint8, the same as blocks of dots.py, for weights
    that are codes. weights: uint8, the matrix's panels from byte weights_at. bias: float32 at
    bias_at. out: float32 [rows, out_stride]. heights: a matrix's row of a plan, see tiles.py.
    tile: this thread's scratch, float32 [8 * 32].
    """
    panels = (outputs + PANEL - 1) // PANEL
    size = panel_bytes(weight_format, inputs)
    share = _work_share(panels, threads)
    while True:
        first = take_work(sync, share)
        if first >= panels:
            break
        for panel in range(first, min(first + share, panels)):
            row = number = 0
            while row < rows:
                count: Any = np.int64(heights[min(rows - row, PLANNED_ROWS)])
                multiply_weights(
                    x, rounded, x_at + row * inputs, inputs, count, weights,
                    weights_at + panel * size, weight_format,
                    fetched_from(number, size, weight_format), tile, 0,
                )  # fmt: skip
                for r in range(count):
                    for lane in range(0, PANEL, LANES):
                        column = panel * PANEL + lane
                        target = (row + r) * out_stride + column
                        value = add(load(tile, r * PANEL + lane), load(bias, bias_at + column))
                        if residual:
                            value = fma(splat(multiplier), value, load(out, target))
                        store(out, target, value)
                row += count
                number += 1


@kernel
def activate(x: Any, kind: int) -> Any:
    """The MLP's activation on a vector: SiLU, or GELU in its tanh form."""
    one = splat(1.0)
    if kind == SILU:
        return divide(x, add(one, exp(subtract(splat(0.0), x))))
    # tanh(u) = 1 - 2 / (exp(2u) + 1), and 0.5 * (1 + tanh(u)) = 1 - 1 / (exp(2u) + 1)
    cubic = multiply(multiply(multiply(x, x), x), splat(0.044715))
    u = multiply(splat(0.7978845608028654), add(x, cubic))
    return multiply(x, subtract(one, divide(one, add(exp(add(u, u)), one))))


@kernel
def gated_linear(
    sync: Any, threads: int, x: Any, rounded: Any, x_at: int, rows: int, inputs: int, gate: Any,
    up: Any, gate_at: int, up_at: int, gate_format: int, up_format: int, outputs: int, gated: bool,
    gate_bias: Any, up_bias: Any, bias_at: int, activation: int, out: Any, rounded_out: Any,
    heights: Any, tile: Any,
) -> None:  # fmt: skip
    """out = act(x @ G.T + g) * (x @ U.T + u), or act(x @ U.T + u) where not ``gated``.

    Arguments as of ``linear``; out: float32 [rows, outputs]; rounded_out: the same as blocks, if
    it is not empty; tile: [2 * 8 * 32] float32.
    """
    panels = outputs // PANEL
    gate_size = panel_bytes(gate_format, inputs)
    up_size = panel_bytes(up_format, inputs)
    up_tile = MAX_TILE_ROWS * PANEL
    share = _work_share(panels, threads)
    while True:
        first = take_work(sync, share)
        if first >= panels:
            break
        for panel in range(first, min(first + share, panels)):
            row = number = 0
            while row < rows:
                count: Any = np.int64(heights[min(rows - row, PLANNED_ROWS)])
                at = x_at + row * inputs
                if gated:
                    multiply_weights(
                        x, rounded, at, inputs, count, gate, gate_at + panel * gate_size,
                        gate_format, fetched_from(number, gate_size, gate_format), tile, 0,
                    )  # fmt: skip
                multiply_weights(
                    x, rounded, at, inputs, count, up, up_at + panel * up_size, up_format,
                    fetched_from(number, up_size, up_format), tile, up_tile,
                )  # fmt: skip
                for r in range(count):
                    target = (row + r) * outputs + panel * PANEL
                    for lane in range(0, PANEL, LANES):
                        column = panel * PANEL + lane
                        cell = r * PANEL + lane
                        value = add(load(tile, up_tile + cell), load(up_bias, bias_at + column))
                        if gated:
                            opened = add(load(tile, cell), load(gate_bias, bias_at + column))
                            value = multiply(activate(opened, activation), value)
                        else:
                            value = activate(value, activation)
                        store(out, target + lane, value)
                    if len(rounded_out) > 0:
                        round_row(out, target, PANEL, rounded_out, rounded_at(target))
                row += count
                number += 1


@kernel
def embed(
    token: int, weights: Any, weight_format: int, inputs: int, multiplier: float, out: Any,
    out_at: int,
) -> None:  # fmt: skip
    """out[out_at + k] = multiplier * weight of output ``token`` and input k."""
    panel, lane = token // PANEL, token % PANEL
    base = panel * panel_bytes(weight_format, inputs)
    half = PANEL // 2
    for group in range(inputs // GROUP):
        if weight_format == DENSE:
            block = base + group * _DENSE_BLOCK
            for k in range(GROUP):
                value = float_at(weights, block + (k * PANEL + lane) * 4)
                out[out_at + group * GROUP + k] = value * multiplier
            continue
        block = base + group * (_Q4_BLOCK if weight_format == Q4 else _Q8_BLOCK)
        scale = half_to_float(weights, block + lane * 2)
        minimum = half_to_float(weights, block + (PANEL + lane) * 2)
        codes = block + 2 * PANEL * 2
        for k in range(GROUP):
            four, i = k // 4, k % 4
            if weight_format == Q4:
                byte = weights[codes + (four * half + lane % half) * 4 + i]
                code = (byte >> 4) if lane >= half else (byte & 15)
            else:
                code = np.int64(weights[codes + (four * PANEL + lane) * 4 + i]) - 128
            out[out_at + group * GROUP + k] = (code * scale + minimum) * multiplier
