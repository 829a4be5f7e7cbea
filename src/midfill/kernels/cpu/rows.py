"""Work on one row at a time: norms and the rotary embedding.

Norms sum 16 partial sums over the row and add those as a tree: the same order for every row.
"""

from math import sqrt
from typing import Any

import numpy as np

from midfill.kernels.cpu.jit import kernel
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


@kernel
def norm(
    kind: int, x: Any, x_at: int, size: int, epsilon: float, weight: Any, bias: Any,
    weight_at: int, out: Any, out_at: int,
) -> None:  # fmt: skip
    """RMSNorm (kind 0) or LayerNorm (kind 1) of x[x_at:x_at + size]; size a multiple of 16."""
    mean = splat(np.float32(0.0))
    if kind == LAYER:
        total = splat(np.float32(0.0))
        for i in range(0, size, LANES):
            total = add(total, load(x, x_at + i))
        mean = splat(np.float32(sum_lanes(total) / np.float32(size)))
    squares = splat(np.float32(0.0))
    for i in range(0, size, LANES):
        centred = subtract(load(x, x_at + i), mean)
        squares = fma(centred, centred, squares)
    variance = sum_lanes(squares) / np.float32(size)
    factor = splat(np.float32(1.0 / sqrt(variance + np.float32(epsilon))))
    for i in range(0, size, LANES):
        scaled = multiply(
            multiply(subtract(load(x, x_at + i), mean), factor), load(weight, weight_at + i)
        )
        if kind == LAYER:
            scaled = add(scaled, load(bias, weight_at + i))
        store(out, out_at + i, scaled)


@kernel
def rotate(
    x: Any, x_at: int, half: int, cos: Any, sin: Any, position: int, out: Any, out_at: int
) -> None:
    """Rotary embedding of one head, its halves turned against each other (NEOX order)."""
    table = position * half
    whole = half - half % LANES
    for i in range(0, whole, LANES):
        cosine, sine = load(cos, table + i), load(sin, table + i)
        lower, upper = load(x, x_at + i), load(x, x_at + half + i)
        store(out, out_at + i, subtract(multiply(lower, cosine), multiply(upper, sine)))
        store(out, out_at + half + i, add(multiply(upper, cosine), multiply(lower, sine)))
    for i in range(whole, half):
        c, s = cos[table + i], sin[table + i]
        low, high = x[x_at + i], x[x_at + half + i]
        out[out_at + i] = low * c - high * s
        out[out_at + half + i] = high * c + low * s
