"""Convolution, recurrence and gate of a layer with a state (``models.config.StateSpace``).

The recurrence walks a request's rows one by one, 16 numbers of a head's x at a time: their part of
S, 8 KB where a state has 128 numbers, stays in the chip's first cache meanwhile. So a row's result
has the same bits however a prompt is cut into chunks, and prompts cost what decodes cost. Vector
lanes run over x; sums over the state are four, of every fourth number, added as a tree.
"""

import numpy as np

from midfill.kernels.cpu.activations import quantize
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.linear import SILU, activate
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.rows import norm
from midfill.kernels.cpu.simd import (
    LANES,
    absolute,
    add,
    divide,
    exp,
    fma,
    load,
    maximum,
    multiply,
    splat,
    store,
    subtract,
)
from midfill.kernels.cpu.state_space.data import (
    DeltaSizes,
    DeltaWeights,
    StateMemory,
    StateSizes,
    StateWeights,
    StateWorkspace,
)
from midfill.kernels.cpu.thread_pool import ThreadContext, take_work

CHANNEL_BLOCKS = 4
"""Blocks of 16 channels that a thread takes at a time."""


@kernel
def state_at(sizes: StateSizes | DeltaSizes, state: int, layer: int) -> int:
    """Return where a layer's part of a state begins."""
    return (state * sizes.layers + layer) * sizes.layer_floats


@kernel
def softplus(x: Float32Array) -> Float32Array:
    """Return log(1 + exp(x)) of a vector: max(x, 0) + log(1 + y) with y = exp(-|x|).

    log(1 + y) = 2 artanh(s) with s = y / (2 + y), which is at most 1/3: the terms of artanh's
    series up to s^15 / 15 leave an error below 1e-9.
    """
    zero, one = splat(np.float32(0.0)), splat(np.float32(1.0))
    y = exp(subtract(zero, absolute(x)))
    s = divide(y, add(y, splat(np.float32(2.0))))
    square = multiply(s, s)
    series = splat(np.float32(1.0 / 15.0))
    series = fma(series, square, splat(np.float32(1.0 / 13.0)))
    series = fma(series, square, splat(np.float32(1.0 / 11.0)))
    series = fma(series, square, splat(np.float32(1.0 / 9.0)))
    series = fma(series, square, splat(np.float32(1.0 / 7.0)))
    series = fma(series, square, splat(np.float32(1.0 / 5.0)))
    series = fma(series, square, splat(np.float32(1.0 / 3.0)))
    series = fma(series, square, one)
    return add(maximum(x, zero), multiply(add(s, s), series))


@kernel
def compute_steps(
    context: ThreadContext, weights: StateWeights, layer: int, rows: int, memory: StateMemory
) -> None:
    """Compute dt and exp(dt A) of all rows and heads."""
    sizes = weights.sizes
    heads, first = sizes.padded_heads, sizes.inner + sizes.mixed
    for row in range(context.thread, rows, context.threads):
        for head in range(0, heads, LANES):
            raw = load(memory.projected, row * sizes.stride + first + head)
            step = softplus(add(raw, load(weights.dt_bias, layer * heads + head)))
            decay = load(weights.decay, layer * heads + head)
            store(memory.steps, row * heads + head, step)
            store(memory.factors, row * heads + head, exp(multiply(step, decay)))


@kernel
def convolve_channels(
    weights: StateWeights | DeltaWeights, layer: int, channel: int, first: int, end: int,
    memory: StateMemory, values: Float32Array, at: int,
) -> None:  # fmt: skip
    """Convolve 16 channels of the rows first <= i < end, whose state's part begins at ``at``."""
    sizes = weights.sizes
    mixed, kept = sizes.mixed, sizes.conv_width - 1
    bias = load(weights.conv_bias, layer * mixed + channel)
    source = sizes.inner + channel
    for row in range(first, end):
        total = bias
        for tap in range(sizes.conv_width):
            place = row - kept + tap
            weight = load(weights.conv, (layer * sizes.conv_width + tap) * mixed + channel)
            if place >= first:
                total = fma(load(memory.projected, place * sizes.stride + source), weight, total)
            else:
                before = at + (kept + place - first) * mixed + channel
                total = fma(load(values, before), weight, total)
        store(memory.mixed, row * mixed + channel, activate(total, SILU))
    for number in range(kept):
        place = end - kept + number
        to = at + number * mixed + channel
        if place >= first:
            store(values, to, load(memory.projected, place * sizes.stride + source))
        else:  # later inputs are kept further on: none is lost
            store(values, to, load(values, at + (kept + place - first) * mixed + channel))


@kernel
def convolve(
    context: ThreadContext, weights: StateWeights, layer: int, indptr: Int32Array,
    space: StateWorkspace,
) -> None:  # fmt: skip
    """Compute x, B and C of all rows, and keep the last inputs.

    Args:
        context: this thread.
        weights: of all layers with a state.
        layer: whose to use.
        indptr: int32 [requests + 1], ``ForwardBatch.query_indptr``.
        space: takes the results.
    """
    sizes = weights.sizes
    blocks = sizes.mixed // LANES
    work = take_work(context.sync, CHANNEL_BLOCKS)
    while work < blocks:
        for block in range(work, min(work + CHANNEL_BLOCKS, blocks)):
            for request in range(len(indptr) - 1):
                at = state_at(sizes, space.requests[request], layer)
                convolve_channels(
                    weights, layer, block * LANES, indptr[request], indptr[request + 1],
                    space.memory, space.values, at,
                )  # fmt: skip
        work = take_work(context.sync, CHANNEL_BLOCKS)


@kernel
def _advance(
    sizes: StateSizes, skip: Float32Array, head: int, column: int, first: int, end: int,
    memory: StateMemory, values: Float32Array, at: int,
) -> None:  # fmt: skip
    """Run the recurrence of 16 numbers of x over the rows first <= i < end.

    Args:
        sizes: of a layer.
        skip: vector of D.
        head: of the layer.
        column: of x.
        first, end: the rows.
        memory: of the step.
        values, at: their part of S, [state_dim, 16].
    """
    heads, mixed = sizes.padded_heads, sizes.mixed
    zero = splat(np.float32(0.0))
    for row in range(first, end):
        x = load(memory.mixed, row * mixed + column)
        added = multiply(x, splat(memory.steps[row * heads + head]))
        factor = splat(memory.factors[row * heads + head])
        b = row * mixed + sizes.inner
        c = b + sizes.state_dim
        y0, y1, y2, y3 = multiply(x, skip), zero, zero, zero
        for n in range(0, sizes.state_dim, 4):
            to = at + n * LANES
            s = multiply(added, splat(memory.mixed[b + n]))
            s = fma(load(values, to), factor, s)
            store(values, to, s)
            y0 = fma(s, splat(memory.mixed[c + n]), y0)
            s = multiply(added, splat(memory.mixed[b + n + 1]))
            s = fma(load(values, to + LANES), factor, s)
            store(values, to + LANES, s)
            y1 = fma(s, splat(memory.mixed[c + n + 1]), y1)
            s = multiply(added, splat(memory.mixed[b + n + 2]))
            s = fma(load(values, to + 2 * LANES), factor, s)
            store(values, to + 2 * LANES, s)
            y2 = fma(s, splat(memory.mixed[c + n + 2]), y2)
            s = multiply(added, splat(memory.mixed[b + n + 3]))
            s = fma(load(values, to + 3 * LANES), factor, s)
            store(values, to + 3 * LANES, s)
            y3 = fma(s, splat(memory.mixed[c + n + 3]), y3)
        store(memory.outputs, row * sizes.inner + column, add(add(y0, y1), add(y2, y3)))


@kernel
def advance_states(
    context: ThreadContext, weights: StateWeights, layer: int, indptr: Int32Array,
    space: StateWorkspace,
) -> None:  # fmt: skip
    """Compute y of all rows; threads share requests, heads and parts of heads. As ``convolve``."""
    sizes = weights.sizes
    parts = sizes.head_dim // LANES
    columns = sizes.heads * parts
    work = take_work(context.sync, 1)
    while work < (len(indptr) - 1) * columns:
        request, block = work // columns, work % columns
        head = block // parts
        at = state_at(sizes, space.requests[request], layer)
        at += (sizes.conv_width - 1) * sizes.mixed + block * sizes.state_dim * LANES
        _advance(
            sizes, splat(weights.skip[layer * sizes.padded_heads + head]), head, block * LANES,
            indptr[request], indptr[request + 1], space.memory, space.values, at,
        )  # fmt: skip
        work = take_work(context.sync, 1)


@kernel
def gate_rows(
    context: ThreadContext, weights: StateWeights, layer: int, rows: int, memory: StateMemory
) -> None:
    """Compute norm(y * silu(z)) of all rows."""
    sizes = weights.sizes
    for row in range(context.thread, rows, context.threads):
        at = row * sizes.inner
        for i in range(0, sizes.inner, LANES):
            gate = activate(load(memory.projected, row * sizes.stride + i), SILU)
            store(memory.outputs, at + i, multiply(load(memory.outputs, at + i), gate))
        norm(memory.outputs, at, weights.gate_norm, layer, memory.gated.values, at)
        quantize(memory.gated, at, sizes.inner)
