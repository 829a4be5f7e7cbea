"""The gated delta rule (``models.config.DeltaRule``), and gates of the other layers' attention.

As in ``recurrence``, a request's rows go by one by one, 16 numbers of a head's v at a time, whose
part of S stays in the chip's first cache meanwhile. So a row has the same bits however a prompt is
cut into chunks. The form that computes a chunk's rows together by products of matrices (section 3.3
of the paper) saves nothing here: it multiplies as often, three times for each number of S and row,
and what it saves in loads and stores comes from the first cache. All of it is a few percent of a
prompt's multiplications.
"""

from math import sqrt
from typing import Any

import numpy as np

from midfill.kernels.cpu.activations import quantize
from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.clock import NORM, QKV, end_phase
from midfill.kernels.cpu.decoder import MAX_SOLO_ROWS, tiling_of
from midfill.kernels.cpu.decoder_data import DecoderConfig
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.linear import SILU, LinearOutput, activate
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.rows import norm
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
    sum_lanes,
)
from midfill.kernels.cpu.state_space.data import (
    DeltaSizes,
    DeltaWeights,
    StateMemory,
    StateWorkspace,
)
from midfill.kernels.cpu.state_space.recurrence import (
    CHANNEL_BLOCKS,
    convolve_channels,
    softplus,
    state_at,
)
from midfill.kernels.cpu.thread_pool import ThreadContext, take_work
from midfill.kernels.cpu.tiles import QKV_TILES

_EPSILON = 1e-6
"""Added to the square of a key's or query's length."""


@kernel
def _sigmoid(x: Any) -> Any:
    """Return the sigmoid of a vector."""
    one = splat(np.float32(1.0))
    return divide(one, add(one, exp(subtract(splat(np.float32(0.0)), x))))


@kernel
def _scale_to(x: Float32Array, at: int, size: int, length: float) -> None:
    """Scale the vector x[at:at + size] to a length."""
    squares = splat(np.float32(0.0))
    for i in range(0, size, LANES):
        number = load(x, at + i)
        squares = fma(number, number, squares)
    factor = splat(np.float32(length / sqrt(sum_lanes(squares) + np.float32(_EPSILON))))
    for i in range(0, size, LANES):
        store(x, at + i, multiply(load(x, at + i), factor))


@kernel
def convolve_heads(
    context: ThreadContext, weights: DeltaWeights, layer: int, indptr: Int32Array,
    space: StateWorkspace,
) -> None:  # fmt: skip
    """Compute q, k and v of all rows, q and k scaled, and keep the last inputs.

    Args:
        context: this thread.
        weights: of all layers with a state.
        layer: whose to use.
        indptr: int32 [requests + 1], ``ForwardBatch.query_indptr``.
        space: takes the results.
    """
    sizes, memory = weights.sizes, space.memory
    dim, step = sizes.state_dim, CHANNEL_BLOCKS * LANES
    keys, rows = 2 * sizes.key_heads, indptr[len(indptr) - 1]
    units = keys + (sizes.inner + step - 1) // step
    work = take_work(context.sync, 1)
    while work < units:
        is_value = work >= keys
        first = keys * dim + (work - keys) * step if is_value else work * dim
        end = min(first + step, sizes.mixed) if is_value else first + dim
        for channel in range(first, end, LANES):
            for request in range(len(indptr) - 1):
                at = state_at(sizes, space.requests[request], layer)
                convolve_channels(
                    weights, layer, channel, indptr[request], indptr[request + 1], memory,
                    space.values, at,
                )  # fmt: skip
        if not is_value:
            length = 1.0 / sqrt(np.float64(dim)) if work < sizes.key_heads else 1.0
            for row in range(rows):
                _scale_to(memory.mixed, row * sizes.mixed + first, dim, length)
        work = take_work(context.sync, 1)


@kernel
def compute_gates(
    context: ThreadContext, weights: DeltaWeights, layer: int, rows: int, memory: StateMemory
) -> None:
    """Compute beta and alpha of all rows and heads."""
    sizes = weights.sizes
    heads, first = sizes.padded_heads, sizes.inner + sizes.mixed
    for row in range(context.thread, rows, context.threads):
        for head in range(0, heads, LANES):
            at = row * sizes.stride + first + head
            store(memory.steps, row * heads + head, _sigmoid(load(memory.projected, at)))
            raw = load(memory.projected, at + sizes.heads)
            step = softplus(add(raw, load(weights.dt_bias, layer * heads + head)))
            decay = load(weights.decay, layer * heads + head)
            store(memory.factors, row * heads + head, exp(multiply(step, decay)))


@kernel
def _apply(
    sizes: DeltaSizes, head: int, column: int, first: int, end: int, memory: StateMemory,
    values: Float32Array, at: int,
) -> None:  # fmt: skip
    """Run the rule for 16 numbers of v over the rows first <= i < end.

    Sums over the state are four, of every fourth number, added as a tree.

    Args:
        sizes: of a layer.
        head: of the layer.
        column: of v.
        first, end: the rows.
        memory: of the step.
        values, at: their part of S, [state_dim, 16].
    """
    heads, mixed, dim = sizes.padded_heads, sizes.mixed, sizes.state_dim
    keys = sizes.key_heads * dim
    own = head // sizes.consecutive % sizes.key_heads * dim
    zero = splat(np.float32(0.0))
    for row in range(first, end):
        q = row * mixed + own
        k = q + keys
        m0, m1, m2, m3 = zero, zero, zero, zero
        for n in range(0, dim, 4):
            part = at + n * LANES
            m0 = fma(load(values, part), splat(memory.mixed[k + n]), m0)
            m1 = fma(load(values, part + LANES), splat(memory.mixed[k + n + 1]), m1)
            m2 = fma(load(values, part + 2 * LANES), splat(memory.mixed[k + n + 2]), m2)
            m3 = fma(load(values, part + 3 * LANES), splat(memory.mixed[k + n + 3]), m3)
        factor = splat(memory.factors[row * heads + head])
        recalled = multiply(add(add(m0, m1), add(m2, m3)), factor)
        v = load(memory.mixed, row * mixed + 2 * keys + column)
        added = multiply(subtract(v, recalled), splat(memory.steps[row * heads + head]))
        y0, y1, y2, y3 = zero, zero, zero, zero
        for n in range(0, dim, 4):
            part = at + n * LANES
            s = multiply(added, splat(memory.mixed[k + n]))
            s = fma(load(values, part), factor, s)
            store(values, part, s)
            y0 = fma(s, splat(memory.mixed[q + n]), y0)
            s = multiply(added, splat(memory.mixed[k + n + 1]))
            s = fma(load(values, part + LANES), factor, s)
            store(values, part + LANES, s)
            y1 = fma(s, splat(memory.mixed[q + n + 1]), y1)
            s = multiply(added, splat(memory.mixed[k + n + 2]))
            s = fma(load(values, part + 2 * LANES), factor, s)
            store(values, part + 2 * LANES, s)
            y2 = fma(s, splat(memory.mixed[q + n + 2]), y2)
            s = multiply(added, splat(memory.mixed[k + n + 3]))
            s = fma(load(values, part + 3 * LANES), factor, s)
            store(values, part + 3 * LANES, s)
            y3 = fma(s, splat(memory.mixed[q + n + 3]), y3)
        store(memory.outputs, row * sizes.inner + column, add(add(y0, y1), add(y2, y3)))


@kernel
def apply_delta_rule(
    context: ThreadContext, weights: DeltaWeights, layer: int, indptr: Int32Array,
    space: StateWorkspace,
) -> None:  # fmt: skip
    """Compute y of all rows; threads share requests, heads and parts of heads.

    Arguments as in ``convolve_heads``.
    """
    sizes = weights.sizes
    parts = sizes.head_dim // LANES
    columns = sizes.heads * parts
    work = take_work(context.sync, 1)
    while work < (len(indptr) - 1) * columns:
        request, block = work // columns, work % columns
        at = state_at(sizes, space.requests[request], layer)
        at += (sizes.conv_width - 1) * sizes.mixed + block * sizes.state_dim * LANES
        _apply(
            sizes, block // parts, block * LANES, indptr[request], indptr[request + 1],
            space.memory, space.values, at,
        )  # fmt: skip
        work = take_work(context.sync, 1)


@kernel
def gate_heads(
    context: ThreadContext, weights: DeltaWeights, layer: int, rows: int, memory: StateMemory
) -> None:
    """Compute norm(y) * silu(z) of all rows."""
    sizes, gated = weights.sizes, memory.gated
    dim = sizes.head_dim
    for unit in range(context.thread, rows * sizes.heads, context.threads):
        row, head = unit // sizes.heads, unit % sizes.heads
        at, gate = unit * dim, row * sizes.stride + head * dim
        norm(memory.outputs, at, weights.head_norm, layer, gated.values, at)
        for i in range(0, dim, LANES):
            factor = activate(load(memory.projected, gate + i), SILU)
            store(gated.values, at + i, multiply(load(gated.values, at + i), factor))
        quantize(gated, at, dim)


@kernel
def gate_attended(
    context: ThreadContext, config: DecoderConfig, weights: DeltaWeights, layer: int, rows: int,
    space: StateWorkspace,
) -> None:  # fmt: skip
    """attended *= sigmoid(gates), which are computed from the rows that queries were.

    Args:
        context: this thread.
        config: the model.
        weights: of all layers.
        layer: number among those with attention.
        rows: of the step.
        space: has the normed rows, and what attention put out.
    """
    workspace, gates, dim = space.decoder, space.memory.projected, config.head_dim
    # Where ``norm_rows`` left them.
    start = context.thread * rows * config.hidden if rows <= MAX_SOLO_ROWS else 0
    out = LinearOutput(
        gates, rows, weights.query_gate.outputs, False, 1.0, workspace.maxima[0], False
    )
    call_kernel(
        config.linear,
        (
            context, workspace.normed, start, weights.query_gate, layer, out,
            tiling_of(workspace, context, QKV_TILES),
        ),
    )  # fmt: skip
    end_phase(context, QKV)
    attended = workspace.attended
    for unit in range(context.thread, rows * config.query_heads, context.threads):
        at = unit * dim
        for i in range(at, at + dim, LANES):
            factor = _sigmoid(load(gates, i))
            store(attended.values, i, multiply(load(attended.values, i), factor))
        quantize(attended, at, dim)
    end_phase(context, NORM)
