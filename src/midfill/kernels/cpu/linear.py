"""Linear layers over packed rows, shared out among the team panel by panel.

Each function is one phase: every thread of the team calls it, claims panels until none is left,
and returns without waiting. The caller sets a barrier between phases.
"""

from typing import Any

from midfill.kernels.cpu.halves import half_to_float
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.matmul import (
    dequantise_q4,
    dequantise_q8,
    multiply_f32_1,
    multiply_f32_2,
    multiply_f32_3,
    multiply_f32_4,
    multiply_f32_5,
    multiply_f32_6,
    multiply_f32_7,
    multiply_f32_8,
    multiply_q4_1,
    multiply_q4_2,
    multiply_q4_3,
    multiply_q4_4,
    multiply_q8_1,
    multiply_q8_2,
    multiply_q8_3,
    multiply_q8_4,
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

Q4, Q8, DENSE = int(WeightFormat.Q4), int(WeightFormat.Q8), int(WeightFormat.F32)
_Q4_BLOCK = block_bytes(WeightFormat.Q4)
_Q8_BLOCK = block_bytes(WeightFormat.Q8)
_DENSE_BLOCK = block_bytes(WeightFormat.F32)

MAX_TILE_ROWS = 8
DIRECT_ROWS = 4
"""Up to so many rows are multiplied with the codes; more pay for dequantising the panel first."""

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
    tile: Any, tile_at: int,
) -> None:  # fmt: skip
    if rows == 1:
        multiply_q4_1(x, at, stride, groups, panel, panel_at, tile, tile_at)
    elif rows == 2:
        multiply_q4_2(x, at, stride, groups, panel, panel_at, tile, tile_at)
    elif rows == 3:
        multiply_q4_3(x, at, stride, groups, panel, panel_at, tile, tile_at)
    else:
        multiply_q4_4(x, at, stride, groups, panel, panel_at, tile, tile_at)


@kernel
def _multiply_q8(
    x: Any, at: int, stride: int, rows: int, groups: int, panel: Any, panel_at: int,
    tile: Any, tile_at: int,
) -> None:  # fmt: skip
    if rows == 1:
        multiply_q8_1(x, at, stride, groups, panel, panel_at, tile, tile_at)
    elif rows == 2:
        multiply_q8_2(x, at, stride, groups, panel, panel_at, tile, tile_at)
    elif rows == 3:
        multiply_q8_3(x, at, stride, groups, panel, panel_at, tile, tile_at)
    else:
        multiply_q8_4(x, at, stride, groups, panel, panel_at, tile, tile_at)


@kernel
def multiply_weights(
    x: Any, at: int, inputs: int, rows: int, weights: Any, panel_at: int, weight_format: int,
    dequantised: bool, floats: Any, tile: Any, tile_at: int,
) -> None:  # fmt: skip
    """tile[rows, 32] = x[rows, inputs] @ one panel, from ``floats`` where it is dequantised."""
    if dequantised:
        multiply_floats(x, at, inputs, rows, inputs, floats, 0, PANEL, tile, tile_at)
    elif weight_format == Q4:
        _multiply_q4(x, at, inputs, rows, inputs // GROUP, weights, panel_at, tile, tile_at)
    elif weight_format == Q8:
        _multiply_q8(x, at, inputs, rows, inputs // GROUP, weights, panel_at, tile, tile_at)
    else:
        multiply_floats(x, at, inputs, rows, inputs, weights, panel_at, PANEL, tile, tile_at)


@kernel
def dequantise_panel(
    weights: Any, panel_at: int, weight_format: int, inputs: int, floats: Any
) -> None:
    """floats[k * 32 + n] = the weights of a Q4 or Q8 panel."""
    if weight_format == Q4:
        dequantise_q4(inputs // GROUP, weights, panel_at, floats, 0)
    else:
        dequantise_q8(inputs // GROUP, weights, panel_at, floats, 0)


@kernel
def _work_share(panels: int, threads: int) -> int:
    """Panels to claim at once: long runs stream well, small ones even out a busy core."""
    return max(1, panels // (threads * 4))


@kernel
def linear(
    sync: Any, threads: int, x: Any, x_at: int, rows: int, inputs: int, weights: Any,
    weights_at: int, weight_format: int, outputs: int, bias: Any, bias_at: int, out: Any,
    out_stride: int, residual: bool, multiplier: float, floats: Any, tile: Any,
) -> None:  # fmt: skip
    """out = x @ W.T + b, or out += multiplier * (x @ W.T + b) where ``residual``.

    x: float32 [rows, inputs] at x_at. weights: uint8, the matrix's panels from byte weights_at.
    bias: float32 at bias_at. out: float32 [rows, out_stride]. floats, tile: this thread's
    scratch, float32 [inputs * 32] and [8 * 32].
    """
    panels = (outputs + PANEL - 1) // PANEL
    size = panel_bytes(weight_format, inputs)
    dequantised = weight_format != DENSE and rows > DIRECT_ROWS
    direct = weight_format != DENSE and not dequantised
    largest = DIRECT_ROWS if direct else MAX_TILE_ROWS
    share = _work_share(panels, threads)
    while True:
        first = take_work(sync, share)
        if first >= panels:
            break
        for panel in range(first, min(first + share, panels)):
            panel_at = weights_at + panel * size
            if dequantised:
                dequantise_panel(weights, panel_at, weight_format, inputs, floats)
            row = 0
            while row < rows:
                count = min(largest, rows - row)
                multiply_weights(
                    x, x_at + row * inputs, inputs, count, weights, panel_at, weight_format,
                    dequantised, floats, tile, 0,
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
    sync: Any, threads: int, x: Any, x_at: int, rows: int, inputs: int, gate: Any, up: Any,
    gate_at: int, up_at: int, gate_format: int, up_format: int, outputs: int, gated: bool,
    gate_bias: Any, up_bias: Any, bias_at: int, activation: int, out: Any, out_stride: int,
    floats: Any, tile: Any,
) -> None:  # fmt: skip
    """out = act(x @ G.T + g) * (x @ U.T + u), or act(x @ U.T + u) where not ``gated``.

    Arguments as of ``linear``; floats: [2 * inputs * 32], tile: [2 * 8 * 32] float32.
    """
    panels = (outputs + PANEL - 1) // PANEL
    gate_size = panel_bytes(gate_format, inputs)
    up_size = panel_bytes(up_format, inputs)
    many = rows > DIRECT_ROWS
    largest = MAX_TILE_ROWS if many else DIRECT_ROWS
    gate_dequantised = many and gate_format != DENSE
    up_dequantised = many and up_format != DENSE
    gate_floats, up_floats = floats[: inputs * PANEL], floats[inputs * PANEL :]
    up_tile = MAX_TILE_ROWS * PANEL
    share = _work_share(panels, threads)
    while True:
        first = take_work(sync, share)
        if first >= panels:
            break
        for panel in range(first, min(first + share, panels)):
            if gated and gate_dequantised:
                dequantise_panel(
                    gate, gate_at + panel * gate_size, gate_format, inputs, gate_floats
                )
            if up_dequantised:
                dequantise_panel(up, up_at + panel * up_size, up_format, inputs, up_floats)
            row = 0
            while row < rows:
                count = min(largest, rows - row)
                at = x_at + row * inputs
                if gated:
                    multiply_weights(
                        x, at, inputs, count, gate, gate_at + panel * gate_size, gate_format,
                        gate_dequantised, gate_floats, tile, 0,
                    )  # fmt: skip
                multiply_weights(
                    x, at, inputs, count, up, up_at + panel * up_size, up_format,
                    up_dequantised, up_floats, tile, up_tile,
                )  # fmt: skip
                for r in range(count):
                    for lane in range(0, PANEL, LANES):
                        column = panel * PANEL + lane
                        cell = r * PANEL + lane
                        value = add(load(tile, up_tile + cell), load(up_bias, bias_at + column))
                        if gated:
                            opened = add(load(tile, cell), load(gate_bias, bias_at + column))
                            value = multiply(activate(opened, activation), value)
                        else:
                            value = activate(value, activation)
                        store(out, (row + r) * out_stride + column, value)
                row += count


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
            if weight_format == Q4:
                byte = weights[codes + k * half + lane % half]
                code = (byte >> 4) if lane >= half else (byte & 15)
            else:
                byte = weights[codes + k * PANEL + lane]
                code = byte - 256 if byte > 127 else byte
            out[out_at + group * GROUP + k] = (code * scale + minimum) * multiplier
