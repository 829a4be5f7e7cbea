"""Norms and the rotary embedding, one row at a time.

A norm keeps 16 partial sums over the row and adds them as a tree: the same order for every row.
"""

from math import sqrt
from typing import NamedTuple

import numpy as np

from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    fma,
    load,
    multiply,
    splat,
    store,
    subtract,
    sum_lanes,
)

RMS, LAYER = 0, 1


class NormWeights(NamedTuple):
    """A norm of all layers.

    Attributes:
        weight: float32 [layers * size], one layer after the other.
        bias: float32 [layers * size]; may be empty for RMSNorm.
        size: elements of a row, a multiple of 16.
        kind: RMS or LAYER.
        epsilon: added to the variance.
    """

    weight: Float32Array
    bias: Float32Array
    size: int
    kind: int
    epsilon: float


class RopeTables(NamedTuple):
    """The rotary embedding's angles.

    Attributes:
        cos, sin: float32 [tables * positions * half].
        half: half of a head's dimensions.
        first: int32 [layers], where a layer's table begins: 0, or the number of positions.
    """

    cos: Float32Array
    sin: Float32Array
    half: int
    first: Int32Array


@kernel
def norm(
    x: Float32Array, x_at: int, weights: NormWeights, layer: int, out: Float32Array, out_at: int
) -> None:
    """Compute RMSNorm or LayerNorm of the row at x[x_at], to out[out_at]; may be in place."""
    size, weight_at = weights.size, layer * weights.size
    mean = splat(np.float32(0.0))
    if weights.kind == LAYER:
        total = splat(np.float32(0.0))
        for i in range(0, size, LANES):
            total = add(total, load(x, x_at + i))
        mean = splat(np.float32(sum_lanes(total) / np.float32(size)))
    squares = splat(np.float32(0.0))
    for i in range(0, size, LANES):
        centred = subtract(load(x, x_at + i), mean)
        squares = fma(centred, centred, squares)
    variance = sum_lanes(squares) / np.float32(size)
    factor = splat(np.float32(1.0 / sqrt(variance + np.float32(weights.epsilon))))
    for i in range(0, size, LANES):
        centred = subtract(load(x, x_at + i), mean)
        scaled = multiply(multiply(centred, factor), load(weights.weight, weight_at + i))
        if weights.kind == LAYER:
            scaled = add(scaled, load(weights.bias, weight_at + i))
        store(out, out_at + i, scaled)


@inlined_kernel
def rotate(x: Float32Array, at: int, rope: RopeTables, layer: int, position: int) -> None:
    """Rotate the head at x[at] in place, its halves against each other (NEOX order)."""
    half, table = rope.half, (rope.first[layer] + position) * rope.half
    whole = half - half % LANES
    for i in range(0, whole, LANES):
        cosine, sine = load(rope.cos, table + i), load(rope.sin, table + i)
        lower, upper = load(x, at + i), load(x, at + half + i)
        store(x, at + i, subtract(multiply(lower, cosine), multiply(upper, sine)))
        store(x, at + half + i, add(multiply(upper, cosine), multiply(lower, sine)))
    for i in range(whole, half):
        c, s = rope.cos[table + i], rope.sin[table + i]
        low, high = x[at + i], x[at + half + i]
        x[at + i] = low * c - high * s
        x[at + half + i] = high * c + low * s
