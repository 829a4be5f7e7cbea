"""Online softmax: attention over keys that arrive segment by segment.

Each segment gives a row the maximum of its scores, the sum of their exponentials and a weighted
sum of V. Segments are merged in order (Milakov and Gimelshein, 2018).
"""

from typing import NamedTuple

import numpy as np

from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    first_lane,
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


class SoftmaxSums(NamedTuple):
    """Attention of some rows over some keys, before the division.

    Attributes:
        states: float32 [rows * 2], per row the largest score (-inf if no key was seen) and the
            sum of exp(score - largest).
        sums: float32 [rows * head_dim], V weighted with exp(score - largest).
    """

    states: Float32Array
    sums: Float32Array


@kernel
def clear_states(states: Float32Array, first: int, rows: int) -> None:
    """Set the state of rows from ``first`` on to that of rows that have seen no key."""
    for row in range(first, first + rows):
        states[row * 2] = _MINUS_INFINITY
        states[row * 2 + 1] = np.float32(0.0)


@kernel
def _clear(x: Float32Array, start: int, end: int) -> None:
    """Set x[start:end] to 0, in whole vectors."""
    zero = splat(np.float32(0.0))
    for i in range(start, end, LANES):
        store(x, i, zero)


@inlined_kernel
def softmax_row(
    scores: Float32Array, at: int, count: int, first: int, end: int, states: Float32Array, row: int
) -> None:
    """Replace a row's ``count`` scores by exponentials, and set its state.

    Keys outside first <= key < end are not seen: their exponentials are 0.
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
    maxima = load(scores, at + start)
    for part in range(start + LANES, stop, LANES):
        maxima = maximum(maxima, load(scores, at + part))
    peak = max_lanes(maxima)
    # If all scores are infinite, any finite shift keeps exp away from inf - inf.
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
    total: SoftmaxSums, row: int, part: SoftmaxSums, part_row: int, head_dim: int
) -> None:
    """Merge one row's segment into the segments before it, if there were any."""
    state, part_state = row * 2, part_row * 2
    at, part_at = row * head_dim, part_row * head_dim
    if part.states[part_state] == _MINUS_INFINITY:
        return
    if total.states[state] == _MINUS_INFINITY:
        total.states[state] = part.states[part_state]
        total.states[state + 1] = part.states[part_state + 1]
        for d in range(0, head_dim, LANES):
            store(total.sums, at + d, load(part.sums, part_at + d))
        return
    # The weights of what has the larger peak stay as they are.
    rise = part.states[part_state] - total.states[state]
    old, new = splat(np.float32(1.0)), exp(splat(-abs(rise)))
    if rise > np.float32(0.0):
        old, new = new, old
        total.states[state] = part.states[part_state]
    before, added = total.states[state + 1], part.states[part_state + 1]
    total.states[state + 1] = before * first_lane(old) + added * first_lane(new)
    for d in range(0, head_dim, LANES):
        kept = multiply(load(total.sums, at + d), old)
        store(total.sums, at + d, fma(load(part.sums, part_at + d), new, kept))


@inlined_kernel
def merge_rows(
    totals: SoftmaxSums, parts: SoftmaxSums, first: int, rows: int, head_dim: int
) -> None:
    """Merge a segment's rows, which start at row ``first`` of ``parts``, into ``totals``."""
    for row in range(rows):
        _merge_row(totals, row, parts, first + row, head_dim)


@inlined_kernel
def finish_row(
    totals: SoftmaxSums, row: int, head_dim: int, out: Float32Array, out_at: int
) -> None:
    """Write a row's attention to out[out_at]: its weighted V over the sum of its weights."""
    divisor = splat(totals.states[row * 2 + 1])
    at = row * head_dim
    for d in range(0, head_dim, LANES):
        store(out, out_at + d, divide(load(totals.sums, at + d), divisor))
