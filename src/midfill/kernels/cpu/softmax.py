"""Softmax over keys that come segment by segment.

Each segment gives a row the maximum of its scores, the sum of their exponentials and a weighted
sum of V. Segments are merged in order (online softmax: Milakov and Gimelshein, 2018). A row's
state is two float32: the maximum, before the exponential, and the sum.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    fma,
    keep_lanes,
    load,
    max_lanes,
    maximum,
    multiply,
    splat,
    store,
    subtract,
    sum_lanes,
)

_MINUS_INFINITY = np.float32(-np.inf)


@kernel
def clear_states(states: Any, at: int, rows: int) -> None:
    """The state of rows that have seen nothing."""
    for row in range(at, at + rows):
        states[row * 2] = _MINUS_INFINITY
        states[row * 2 + 1] = np.float32(0.0)


@kernel
def _clear(x: Any, start: int, end: int) -> None:
    """x[start:end] = 0, in whole vectors."""
    zero = splat(np.float32(0.0))
    for i in range(start, end, LANES):
        store(x, i, zero)


@kernel
def softmax_row(
    scores: Any, at: int, count: int, first: int, end: int, states: Any, row: int
) -> None:
    """Turn a row's scores of ``count`` keys into exponentials, of keys first <= j < end alone.

    The others' become 0. The row's state is set.
    """
    low, high = max(first, 0), min(end, count)
    if low >= high:
        clear_states(states, row, 1)
        _clear(scores, at, at + count)
        return
    start, stop = low // LANES * LANES, (high + LANES - 1) // LANES * LANES
    # Only the first vector and the last one can hold keys that aren't seen.
    for part in (start, stop - LANES):
        seen = keep_lanes(load(scores, at + part), low - part, high - part, _MINUS_INFINITY)
        store(scores, at + part, seen)
    peaks = load(scores, at + start)
    for part in range(start + LANES, stop, LANES):
        peaks = maximum(peaks, load(scores, at + part))
    peak = max_lanes(peaks)
    # Scores that are all infinite: any number will do that keeps exp away from inf - inf.
    shift = splat(peak if peak > _MINUS_INFINITY else np.float32(0.0))
    total = splat(np.float32(0.0))
    for part in range(start, stop, LANES):
        weight = exp(subtract(load(scores, at + part), shift))
        store(scores, at + part, weight)
        total = add(total, weight)
    _clear(scores, at, at + start)
    _clear(scores, at + stop, at + count)
    states[row * 2] = peak
    states[row * 2 + 1] = sum_lanes(total)


@kernel
def _merge_row(
    total: Any, total_at: int, total_sums: Any, total_sums_at: int, part: Any, part_at: int,
    part_sums: Any, part_sums_at: int, head_dim: int,
) -> None:  # fmt: skip
    """Merge one row's segment into what came before it, if anything."""
    if part[part_at] == _MINUS_INFINITY:
        return
    if total[total_at] == _MINUS_INFINITY:
        total[total_at], total[total_at + 1] = part[part_at], part[part_at + 1]
        for d in range(0, head_dim, LANES):
            store(total_sums, total_sums_at + d, load(part_sums, part_sums_at + d))
        return
    peak = max(total[total_at], part[part_at])
    old = exp(splat(total[total_at] - peak))
    new = exp(splat(part[part_at] - peak))
    total[total_at] = peak
    total[total_at + 1] = total[total_at + 1] * max_lanes(old) + part[part_at + 1] * max_lanes(new)
    for d in range(0, head_dim, LANES):
        kept = multiply(load(total_sums, total_sums_at + d), old)
        store(total_sums, total_sums_at + d, fma(load(part_sums, part_sums_at + d), new, kept))


@kernel
def merge_rows(
    totals: Any, total_sums: Any, states: Any, sums: Any, at: int, rows: int, head_dim: int
) -> None:
    """Merge a segment's rows, which start at row ``at`` of states and sums, into totals."""
    for r in range(rows):
        _merge_row(
            totals, r * 2, total_sums, r * head_dim, states, (at + r) * 2, sums,
            (at + r) * head_dim, head_dim,
        )  # fmt: skip


@kernel
def finish_row(
    states: Any, row: int, sums: Any, sums_at: int, head_dim: int, out: Any, out_at: int
) -> None:
    """out = weighted V over the sum of weights."""
    divisor = splat(states[row * 2 + 1])
    for d in range(0, head_dim, LANES):
        store(out, out_at + d, divide(load(sums, sums_at + d), divisor))
