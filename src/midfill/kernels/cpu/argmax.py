"""The argmax of each row of logits, found by the threads while they compute logits.

Each thread looks at the columns that it has computed, 16 at a time, while they are in its cache.
Per row it keeps the largest value of each lane, where that was, and whether all values were finite.
In the end the lanes of all threads are compared; of equal values, the first column's wins.
"""

import numpy as np

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.simd import (
    LANES,
    fma,
    keep_lanes,
    load,
    maximum,
    splat,
    store,
    where_larger,
)

MAXIMA_WIDTH = 3 * LANES
"""Numbers per row and thread: each lane's largest value, the first column of the vector in which it
was (exact as a float32), and a sum that is 0 as long as all values are finite."""

_LOWEST = np.float32(np.finfo(np.float32).min)


@kernel
def start_argmax(maxima: Float32Array, rows: int) -> None:
    """Forget what a thread has seen of ``rows`` rows."""
    for row in range(rows):
        at = row * MAXIMA_WIDTH
        store(maxima, at, splat(-np.inf))
        store(maxima, at + LANES, splat(0.0))
        store(maxima, at + 2 * LANES, splat(0.0))


@kernel
def update_argmax(
    logits: Float32Array, start: int, first: int, end: int, maxima: Float32Array, row: int
) -> None:
    """Look at columns first <= column < end of a row.

    Args:
        logits: holds the row from ``start`` on, padded to whole vectors.
        start, first, end: first is a multiple of 16 and grows from call to call.
        maxima: float32 [rows * 48], of this thread.
        row: where in ``maxima``.
    """
    at = row * MAXIMA_WIDTH
    largest, column, fault = (
        load(maxima, at),
        load(maxima, at + LANES),
        load(maxima, at + 2 * LANES),
    )
    for k in range(first, end, LANES):
        x = load(logits, start + k)
        if k + LANES > end:
            x = keep_lanes(x, 0, end - k, _LOWEST)
        column = where_larger(x, largest, splat(np.float32(k)), column)
        largest = maximum(x, largest)
        fault = fma(x, splat(0.0), fault)  # NaN from NaN and infinity on
    store(maxima, at, largest)
    store(maxima, at + LANES, column)
    store(maxima, at + 2 * LANES, fault)


@kernel
def finish_argmax(maxima: Float32Array, threads: int, row: int, argmax: Int32Array) -> None:
    """Set argmax[row] to the column of a row's largest logit; -1 if one is not finite.

    Args:
        maxima: float32 [at least threads, rows * 48].
        threads: that have looked at columns.
        row: which one.
        argmax: int32 [rows].
    """
    largest, token, finite = np.float32(-np.inf), -1, True
    for thread in range(threads):
        for lane in range(LANES):
            at = row * MAXIMA_WIDTH + lane
            value = maxima[thread, at]
            column = int(maxima[thread, at + LANES]) + lane
            finite = finite and maxima[thread, at + 2 * LANES] == 0.0
            if value > largest or (value == largest and column < token):
                largest, token = value, column
    argmax[row] = token if finite else -1
