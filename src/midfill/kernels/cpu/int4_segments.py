"""One segment of 4-bit keys: scores of a tile of query rows, and their weighted sums of V.

Queries are rounded to int8, with a scale per query, and weights too, with a scale per 32 keys. So
products are of integers, four or eight times as many per instruction as in float32, and entries
needn't be converted. Beside the entries' own rounding, that of both doesn't show.
"""

import numpy as np

from midfill.kernels.cpu.int4_products import (
    UNIT,
    score_int4,
    store_block_end,
    store_quants,
    weigh_int4_narrow,
    weigh_int4_wide,
)
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.kv_cache import KVArray, transform_for
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows, blind_rows, empty, keys_seen
from midfill.kernels.cpu.simd import (
    LANES,
    absolute,
    load,
    max_lanes,
    maximum,
    multiply,
    splat,
    store,
)

_STEPS = np.float32(127.0)
_SMALLEST = np.float32(1e-30)
"""Where no number is larger, all are taken for 0."""
_WIDE = 2 * UNIT


@kernel
def quantize_block(x: Float32Array, at: int, length: int, is_entry: bool) -> None:
    """Round x[at:at + length] to a block, which is written in their place; see int4_products.py.

    Args:
        x: float32.
        length: a multiple of 32.
        is_entry: whether quants are in the order of unpacked entries.
    """
    peaks = splat(np.float32(0.0))
    for d in range(at, at + length, LANES):
        peaks = maximum(peaks, absolute(load(x, d)))
    largest = max_lanes(peaks)
    has_range = largest > _SMALLEST
    factor = splat(_STEPS / largest if has_range else np.float32(0.0))
    total = 0
    for d in range(0, length, UNIT):
        # Quants take a quarter of the room, so no number is overwritten before it is read.
        first, second = load(x, at + d), load(x, at + d + LANES)
        total += store_quants(
            x, at + d // 4, is_entry, multiply(first, factor), multiply(second, factor)
        )
    store_block_end(x, at + length // 4, largest / _STEPS if has_range else np.float32(0.0), total)


@inlined_kernel
def quantize_queries(entries: KVArray, queries: Float32Array, rows: int, head_dim: int) -> None:
    """Transform scaled queries [rows, head_dim] as ``entries`` are, and round each to a block."""
    for at in range(0, rows * head_dim, head_dim):
        transform_for(entries, queries, at, head_dim)
        quantize_block(queries, at, head_dim, True)


@inlined_kernel
def score_int4_segment(
    queries: Float32Array, rows: SegmentRows, keys: KVSpan, ahead: KVSpan, panel: Float32Array,
    scores: Float32Array,
) -> None:  # fmt: skip
    """Compute scores[rows, 256] = queries times keys, at least where a row sees the key.

    Args:
        queries: float32 [rows * head_dim], blocks (``quantize_queries``).
        rows: the tile.
        keys: the segment's keys; scores are without their scales.
        ahead: entries to prefetch meanwhile.
        panel: unused.
        scores: float32 [rows * 256].
    """
    dim = rows.head_dim
    for key in range(0, keys.length, LANES):
        row, fetched = min(blind_rows(rows, key), rows.total - 1), ahead
        while row < rows.total:
            n = min(rows.total - row, 4)
            query, to = row * dim, row * SEGMENT + key
            score_int4(n, queries, query, dim, keys, key, fetched, scores, to, SEGMENT)
            fetched = empty(fetched)
            row += n


@kernel
def _quantize_weights(weights: Float32Array, at: int, first: int, end: int, count: int) -> None:
    """Round a row's weights, 0 from key ``count`` on, to a block per 32 keys.

    Args:
        weights: float32; the row is at weights[at:at + 256].
        first: a multiple of 32.
        end: of the keys that are rounded.
        count: keys of the segment.
    """
    last = (count + LANES - 1) // LANES * LANES
    for key in range(first, end, UNIT):
        if last < key + UNIT:
            store(weights, at + last, splat(np.float32(0.0)))
        quantize_block(weights, at + key, UNIT, False)


@inlined_kernel
def _next_rows(left: int) -> int:
    """Return how many of the rows left are weighted next: 3, or what leaves no single row."""
    return 4 if left == 4 else min(left, 3)


@inlined_kernel
def weigh_int4_segment(
    weights: Float32Array, rows: SegmentRows, values: KVSpan, ahead: KVSpan, panel: Float32Array,
    sums: Float32Array, at: int,
) -> None:  # fmt: skip
    """Compute sums[rows, head_dim] at ``at`` = weights[rows, 256] @ V.

    Args:
        weights: float32 [rows * 256]; 0 for keys that a row does not see. They are rounded.
        rows: the tile.
        values: the segment's values.
        ahead: entries to prefetch meanwhile.
        panel: unused.
        sums: float32, where the sums go.
        at: element of ``sums`` at which they start.
    """
    row, dim, window = 0, rows.head_dim, rows.window
    while row < rows.total:
        n = _next_rows(rows.total - row)
        first = max(0, keys_seen(rows, row) - window) // UNIT * UNIT if window > 0 else 0
        end = min(values.length, keys_seen(rows, row + n - 1))
        for r in range(row, row + n):
            _quantize_weights(weights, r * SEGMENT, first, end, values.length)
        for d in range(0, dim, _WIDE):
            from_row, to = row * SEGMENT, at + row * dim + d
            if d + _WIDE <= dim:
                weigh_int4_wide(
                    n, weights, from_row, SEGMENT, values, first, end, dim, d, ahead, sums, to
                )
            else:
                weigh_int4_narrow(
                    n, weights, from_row, SEGMENT, values, first, end, dim, d, ahead, sums, to
                )
            ahead = empty(ahead)
        row += n
