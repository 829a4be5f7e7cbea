"""Streams of hidden rows, one row at a time: predicted, corrected, and what is added to them.

Sums over a row keep 16 partial sums and add them as a tree, like norms: in one order for every row.
"""

from math import sqrt
from typing import Any

import numpy as np

from midfill.kernels.cpu.activations import Activations, block_at, quantize, quantize_row
from midfill.kernels.cpu.altup.data import MIXING, STREAMS, AltUpMemory, AltUpWeights
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.linear import activate
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.rows import norm
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    first_lane,
    fma,
    load,
    maximum,
    multiply,
    splat,
    store,
    subtract,
    sum_lanes,
)

_HALF_LENGTH = 0.7071067811865476
_LEAST_SQUARE = 1e-5
"""Of a projected stream's numbers, on average, before it is brought to the first one's length."""


@kernel
def _tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of a vector: 1 - 2 / (exp(2x) + 1)."""
    one = splat(1.0)
    return subtract(one, divide(splat(2.0), add(exp(add(x, x)), one)))


@kernel
def _route(
    own: AltUpWeights, layer: int, x: Float32Array, at: int, out: Float32Array, out_at: int
) -> None:
    """Write r(x) of the row at x[at] to four numbers from out[out_at] on."""
    size, router = own.sizes.hidden, own.router
    first = layer * STREAMS * size
    squares = total0 = total1 = total2 = total3 = splat(0.0)
    for k in range(0, size, LANES):
        value, weight = load(x, at + k), first + k
        squares = fma(value, value, squares)
        total0 = fma(value, load(router, weight), total0)
        total1 = fma(value, load(router, weight + size), total1)
        total2 = fma(value, load(router, weight + 2 * size), total2)
        total3 = fma(value, load(router, weight + 3 * size), total3)
    variance = sum_lanes(squares) / np.float32(size)
    factor = np.float32(1.0 / sqrt(variance + np.float32(own.sizes.epsilon)))
    out[out_at] = first_lane(_tanh(splat(sum_lanes(total0) * factor)))
    out[out_at + 1] = first_lane(_tanh(splat(sum_lanes(total1) * factor)))
    out[out_at + 2] = first_lane(_tanh(splat(sum_lanes(total2) * factor)))
    out[out_at + 3] = first_lane(_tanh(splat(sum_lanes(total3) * factor)))


@kernel
def predict_row(
    own: AltUpWeights, layer: int, hidden: Float32Array, row: int, memory: AltUpMemory
) -> None:
    """Compute p of all streams; the first is the row that the layer computes with."""
    size, at, to = own.sizes.hidden, row * own.sizes.row_width, row * MIXING
    mixing = memory.mixing
    _route(own, layer, hidden, at, mixing, to)
    for number in range(STREAMS * STREAMS):
        weight = (layer * STREAMS * STREAMS + number) * STREAMS
        total = np.float32(0.0)
        for i in range(STREAMS):
            total += own.predict[weight + i] * mixing[to + i]
        mixing[to + STREAMS + number] = total
    for stream in range(STREAMS):
        target, first = (row * STREAMS + stream) * size, to + STREAMS + stream * STREAMS
        by0, by1 = splat(mixing[first]), splat(mixing[first + 1])
        by2, by3 = splat(mixing[first + 2]), splat(mixing[first + 3])
        for k in range(0, size, LANES):
            value = fma(by0, load(hidden, at + k), load(hidden, at + stream * size + k))
            value = fma(by1, load(hidden, at + size + k), value)
            value = fma(by2, load(hidden, at + 2 * size + k), value)
            value = fma(by3, load(hidden, at + 3 * size + k), value)
            store(memory.predicted, target + k, value)
            if stream == 0:
                store(memory.active, row * size + k, value)


@kernel
def add_laurel(
    own: AltUpWeights, layer: int, normed: Float32Array, at: int, row: int, memory: AltUpMemory
) -> None:
    """Norm the learned residual, and add the row that it is of, which is at normed[at]."""
    size, laurel = own.sizes.hidden, memory.laurel
    own_at = row * size
    norm(laurel, own_at, own.laurel_norm, layer, laurel, own_at)
    for k in range(0, size, LANES):
        store(laurel, own_at + k, add(load(laurel, own_at + k), load(normed, at + k)))


@kernel
def join_row(size: int, row: int, memory: AltUpMemory) -> None:
    """active = (active + laurel) / sqrt(2)."""
    for k in range(row * size, (row + 1) * size, LANES):
        both = add(load(memory.active, k), load(memory.laurel, k))
        store(memory.active, k, multiply(both, splat(_HALF_LENGTH)))


@kernel
def cut_gates(
    cutoff: float, kind: int, size: int, row: int, memory: AltUpMemory, gated: Activations
) -> None:
    """gated = act(what gates have above the mean and ``cutoff`` standard deviations) * up."""
    gate, up, at = memory.gate, memory.up, row * size
    total = squares = splat(0.0)
    for k in range(at, at + size, LANES):
        total = add(total, load(gate, k))
    mean = splat(sum_lanes(total) / np.float32(size))
    for k in range(at, at + size, LANES):
        centred = subtract(load(gate, k), mean)
        squares = fma(centred, centred, squares)
    deviation = np.float32(sqrt(sum_lanes(squares) / np.float32(size)))
    least = fma(splat(deviation), splat(np.float32(cutoff)), mean)
    for k in range(at, at + size, LANES):
        above = maximum(subtract(load(gate, k), least), splat(0.0))
        value = multiply(activate(above, kind), load(up, k))
        store(up, k, value)
        if len(gated.values) > 0:
            store(gated.values, k, value)
    if len(gated.quants) > 0:
        quantize_row(up, at, size, gated.quants, block_at(at))


@kernel
def correct_row(
    own: AltUpWeights, layer: int, hidden: Float32Array, row: int, memory: AltUpMemory,
    scaled: Activations,
) -> None:  # fmt: skip
    """Write the corrected streams to the hidden row, and the first one, scaled, to ``scaled``."""
    size, at, to = own.sizes.hidden, row * own.sizes.row_width, row * MIXING
    active, predicted, first = memory.active, memory.predicted, row * STREAMS * size
    _route(own, layer, active, row * size, memory.mixing, to)
    for stream in range(STREAMS):
        weight = (layer * STREAMS + stream) * STREAMS
        total = np.float32(1.0)
        for i in range(STREAMS):
            total += own.correct[weight + i] * memory.mixing[to + i]
        step = splat(total)
        for k in range(0, size, LANES):
            change = subtract(load(active, row * size + k), load(predicted, first + k))
            value = fma(step, change, load(predicted, first + stream * size + k))
            store(hidden, at + stream * size + k, value)
    for k in range(0, size, LANES):
        value = multiply(load(hidden, at + k), load(own.scale, layer * size + k))
        store(scaled.values, row * size + k, value)
    quantize(scaled, row * size, size)


@kernel
def gate_row(
    own: AltUpWeights, layer: int, kind: int, hidden: Float32Array, row: int, low: Activations
) -> None:
    """low = act(low) * e, with what the layer adds of this token's own."""
    sizes = own.sizes
    width, at = sizes.width, row * sizes.width
    inputs = row * sizes.row_width + STREAMS * sizes.hidden + layer * width
    for k in range(0, width, LANES):
        gate = activate(load(low.values, at + k), kind)
        store(low.values, at + k, multiply(gate, load(hidden, inputs + k)))
    quantize(low, at, width)


@kernel
def add_to_others(
    own: AltUpWeights, layer: int, hidden: Float32Array, row: int, added: Float32Array
) -> None:
    """Norm a row of ``added``, and add it to all streams but the first."""
    size, at, source = own.sizes.hidden, row * own.sizes.row_width, row * own.sizes.hidden
    norm(added, source, own.layer_norm, layer, added, source)
    for stream in range(1, STREAMS):
        target = at + stream * size
        for k in range(0, size, LANES):
            store(hidden, target + k, add(load(hidden, target + k), load(added, source + k)))


@kernel
def mix_inputs(own: AltUpWeights, hidden: Float32Array, row: int, embedded: Float32Array) -> None:
    """Compute e of all layers of W_e h_0, in ``embedded``, and a token's embeddings, in the row."""
    sizes = own.sizes
    width, inputs = sizes.width, row * sizes.row_width + STREAMS * sizes.hidden
    shorter = splat(np.float32(1.0 / sqrt(sizes.hidden)))
    for layer in range(sizes.layers):
        source, target = (row * sizes.layers + layer) * width, inputs + layer * width
        for k in range(source, source + width, LANES):
            store(embedded, k, multiply(load(embedded, k), shorter))
        norm(embedded, source, own.layer_project_norm, 0, embedded, source)
        for k in range(0, width, LANES):
            both = add(load(embedded, source + k), load(hidden, target + k))
            store(hidden, target + k, multiply(both, splat(_HALF_LENGTH)))


@kernel
def _mean_square(x: Float32Array, at: int, size: int) -> Any:
    squares = splat(0.0)
    for k in range(at, at + size, LANES):
        value = load(x, k)
        squares = fma(value, value, squares)
    return np.float32(sum_lanes(squares) / np.float32(size))


@kernel
def match_length(x: Float32Array, at: int, others: Float32Array, other_at: int, size: int) -> None:
    """Bring the stream at others[other_at] to the length of the one at x[at]."""
    wanted = sqrt(_mean_square(x, at, size))
    found = sqrt(max(_mean_square(others, other_at, size), np.float32(_LEAST_SQUARE)))
    factor = splat(np.float32(wanted / found))
    for k in range(other_at, other_at + size, LANES):
        store(others, k, multiply(load(others, k), factor))


@kernel
def average_row(
    size: int, hidden: Float32Array, at: int, others: Float32Array, first: int, stride: int,
    out: Float32Array, out_at: int,
) -> None:  # fmt: skip
    """out = the average of the stream at hidden[at], and of three from others[first] on, each
    ``stride`` numbers after the one before, brought to its length.
    """
    for stream in range(STREAMS - 1):
        match_length(hidden, at, others, first + stream * stride, size)
    for k in range(0, size, LANES):
        total = add(load(hidden, at + k), load(others, first + k))
        total = add(total, load(others, first + stride + k))
        total = add(total, load(others, first + 2 * stride + k))
        store(out, out_at + k, multiply(total, splat(1.0 / STREAMS)))


@kernel
def cap_logits(logits: Float32Array, first: int, end: int, cap: float) -> None:
    """logits = cap * tanh(logits / cap), from a multiple of 16 to another."""
    largest, smaller = splat(np.float32(cap)), splat(np.float32(1.0 / cap))
    for k in range(first, end, LANES):
        store(logits, k, multiply(_tanh(multiply(load(logits, k), smaller)), largest))
