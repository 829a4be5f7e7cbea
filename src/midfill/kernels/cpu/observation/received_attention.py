"""The attention that each key of a head receives from some rows, summed over them.

Weights are made for four rows at a time and added up while they are in the cache, so that those of
all rows, [query heads, rows, keys], are never stored.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.jit import entry_point, inlined_kernel, kernel
from midfill.kernels.cpu.memory import Float32Array, Int32Array, aligned_zeros
from midfill.kernels.cpu.simd import LANES, fma, load, splat, store
from midfill.kernels.cpu.softmax import softmax_row

_ROWS = 4
"""Rows whose weights are computed together, so that a key is loaded once for all of them."""


def received_attention(
    queries: Float32Array, keys: Float32Array, rows: Int32Array, window: int | None
) -> Float32Array:
    """Return the sum over rows of their attention weights.

    Args:
        queries: float32 [query heads, n, head_dim], scaled.
        keys: float32 [keys, head_dim].
        rows: int32 [n], ascending, the numbers of the rows' own keys, which are the last they see.
        window: how many keys a row sees at most; None is all.

    Returns:
        float32 [keys].
    """
    heads, _, head_dim = queries.shape
    padded = -(-len(keys) // LANES) * LANES
    panels = aligned_zeros((padded // LANES, head_dim, LANES), np.float32)
    whole = len(keys) // LANES * LANES
    panels[: whole // LANES] = keys[:whole].reshape(-1, LANES, head_dim).swapaxes(1, 2)
    if whole < len(keys):
        panels[-1, :, : len(keys) - whole] = keys[whole:].T
    received = aligned_zeros(padded, np.float32)
    _add_received(
        np.ascontiguousarray(queries).reshape(-1), panels.reshape(-1),
        np.tile(rows, heads).astype(np.int32), len(keys) if window is None else window, head_dim,
        aligned_zeros(_ROWS * padded, np.float32), aligned_zeros(_ROWS * 2, np.float32), received,
    )  # fmt: skip
    return received[: len(keys)]


@entry_point
def _add_received(
    queries: Float32Array, panels: Float32Array, rows: Int32Array, window: int, head_dim: int,
    scores: Float32Array, states: Float32Array, received: Float32Array,
) -> None:  # fmt: skip
    """Add the attention weights of all rows to ``received``.

    Args:
        queries: float32 [rows * head_dim].
        panels: float32 [panels * head_dim * 16], keys transposed in panels of 16.
        rows: int32 [rows], see ``received_attention``.
        window: keys that a row sees at most.
        head_dim: elements of a key.
        scores: float32 [4 * panels * 16], for the weights of four rows.
        states: float32 [4 * 2], for what they are divided by.
        received: float32 [panels * 16].
    """
    stride = len(received)
    for row in range(0, len(rows), _ROWS):
        count = min(_ROWS, len(rows) - row)
        first, end = stride, 0
        for each in range(row, row + count):
            end = max(end, int(rows[each]) + 1)
            first = min(first, max(int(rows[each]) + 1 - window, 0))
        first, end = first // LANES * LANES, (end + LANES - 1) // LANES * LANES
        for at in range(first, end, LANES):
            if count == _ROWS:
                _score_rows(queries, row * head_dim, panels, at, head_dim, scores, stride)
            else:
                for each in range(count):
                    query = (row + each) * head_dim
                    _score_row(queries, query, panels, at, head_dim, scores, each * stride)
        for each in range(count):
            seen = int(rows[row + each]) + 1
            softmax_row(
                scores, each * stride + first, end - first, seen - window - first, seen - first,
                states, each,
            )  # fmt: skip
            share = splat(np.float32(1.0) / states[each * 2 + 1])
            for at in range(first, end, LANES):
                weights = load(scores, each * stride + at)
                store(received, at, fma(weights, share, load(received, at)))


@kernel
def _score_rows(
    queries: Float32Array, query: int, panels: Float32Array, at: int, head_dim: int,
    scores: Float32Array, stride: int,
) -> None:  # fmt: skip
    """Write the scores of four rows with the 16 keys of the panel at key ``at``."""
    zero = splat(np.float32(0.0))
    first, second, third, fourth = zero, zero, zero, zero
    for d in range(head_dim):
        keys = load(panels, at * head_dim + d * LANES)
        first = fma(_query(queries, query + d), keys, first)
        second = fma(_query(queries, query + head_dim + d), keys, second)
        third = fma(_query(queries, query + 2 * head_dim + d), keys, third)
        fourth = fma(_query(queries, query + 3 * head_dim + d), keys, fourth)
    store(scores, at, first)
    store(scores, stride + at, second)
    store(scores, 2 * stride + at, third)
    store(scores, 3 * stride + at, fourth)


@kernel
def _score_row(
    queries: Float32Array, query: int, panels: Float32Array, at: int, head_dim: int,
    scores: Float32Array, out: int,
) -> None:  # fmt: skip
    """Write the scores of a row with the 16 keys of a panel, as ``_score_rows`` does."""
    total = splat(np.float32(0.0))
    for d in range(head_dim):
        keys = load(panels, at * head_dim + d * LANES)
        total = fma(_query(queries, query + d), keys, total)
    store(scores, out + at, total)


@inlined_kernel
def _query(queries: Float32Array, at: int) -> Any:
    """Return one number of the queries in every lane.

    Numba looks whether an index is negative, which takes longer than the load, unless its type
    says that it isn't.
    """
    return splat(queries[np.uintp(at)])
