"""One segment of keys: scores of a tile of query rows, and their weighted sums of V.

A tile of few rows reads K in place; for many rows keys are transposed to panels first
(key_panels.py). V is always read in place. Rows are computed a few at a time, each group over the
whole segment, so that its sums stay in registers.
"""

from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.key_panels import score_panel, transpose_keys
from midfill.kernels.cpu.kv_products import score_keys, weigh_values_narrow, weigh_values_wide
from midfill.kernels.cpu.kv_spans import KVSpan, load_scales
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows, blind_rows, empty, keys_seen
from midfill.kernels.cpu.simd import LANES, load, multiply, store

MAX_ROWS_IN_PLACE = 8
"""With at most this many rows, keys are read in place."""


@inlined_kernel
def _next_rows(left: int) -> int:
    """Return how many of the rows left are computed next: 4, or what leaves no single row over."""
    if left <= 5:
        return left
    return 3 if left == 6 else 4


@inlined_kernel
def _score_in_place(
    queries: Float32Array, rows: SegmentRows, keys: KVSpan, ahead: KVSpan, scores: Float32Array
) -> None:
    """Compute scores[rows, 256], reading the keys where they lie."""
    row, dim = 0, rows.head_dim
    while row < rows.total:
        query, to, stride = row * dim, row * SEGMENT, SEGMENT
        n = min(rows.total - row, 4) if rows.total - row != 5 else 3
        for key in range(0, keys.length, LANES):
            score_keys(n, queries, query, dim, keys, key, ahead, scores, to + key, stride)
        ahead = empty(ahead)
        row += n


@kernel
def _score_panel(
    queries: Float32Array, rows: SegmentRows, first: int, panel: Float32Array,
    scores: Float32Array, at: int,
) -> None:  # fmt: skip
    """Compute scores of rows from ``first`` on, at least 3 of them, with a panel of 16 keys."""
    row, dim = first, rows.head_dim
    while row < rows.total:
        n = _next_rows(rows.total - row)
        query, to = row * dim, at + row * SEGMENT
        score_panel(n, queries, query, dim, panel, scores, to, SEGMENT)
        row += n


@inlined_kernel
def score_segment(
    queries: Float32Array, rows: SegmentRows, keys: KVSpan, ahead: KVSpan, panel: Float32Array,
    scores: Float32Array,
) -> None:  # fmt: skip
    """Compute scores[rows, 256] = queries times keys, at least where a row sees the key.

    Args:
        queries: float32 [rows * head_dim].
        rows: the tile.
        keys: the segment's keys.
        ahead: entries to prefetch meanwhile.
        panel: float32 [head_dim * 16], scratch.
        scores: float32 [rows * 256].
    """
    if rows.total <= MAX_ROWS_IN_PLACE:
        _score_in_place(queries, rows, keys, ahead, scores)
        return
    for key in range(0, keys.length, LANES):
        transpose_keys(keys, key, rows.head_dim, ahead, panel)
        blind = min(blind_rows(rows, key), rows.total - 3)
        _score_panel(queries, rows, blind, panel, scores, key)


@kernel
def multiply_scales(
    scales: Float32Array, head_at: int, span: KVSpan, rows: int, scores: Float32Array
) -> None:
    """Multiply scores[rows, 256] by the scales of a span's entries, column by column.

    Args:
        scales: key_scales or value_scales of the cache.
        head_at: number of the head's entry of slot 0.
        span: the entries.
        rows: of ``scores``.
        scores: float32 [rows * 256].
    """
    for part in range(0, span.length, LANES):
        factor = load_scales(scales, head_at, span, part)
        for row in range(rows):
            at = row * SEGMENT + part
            store(scores, at, multiply(load(scores, at), factor))


@inlined_kernel
def weigh_segment(
    weights: Float32Array, rows: SegmentRows, values: KVSpan, ahead: KVSpan, sums: Float32Array,
    at: int,
) -> None:  # fmt: skip
    """Compute sums[rows, head_dim] at ``at`` = weights[rows, 256] @ V.

    Args:
        weights: float32 [rows * 256]; 0 for keys that a row does not see.
        rows: the tile.
        values: the segment's values.
        ahead: entries to prefetch meanwhile.
        sums: float32, where the sums go.
        at: element of ``sums`` at which they start.
    """
    row, dim, window = 0, rows.head_dim, rows.window
    while row < rows.total:
        n = _next_rows(rows.total - row)
        first = max(0, keys_seen(rows, row) - window) if window > 0 else 0
        end = min(values.length, keys_seen(rows, row + n - 1))
        d = 0
        while d < dim:
            from_row, to = row * SEGMENT, at + row * dim + d
            if d + 64 <= dim:
                weigh_values_wide(
                    n, weights, from_row, SEGMENT, values, first, end, dim, d, ahead, sums, to
                )
                d += 64
            else:
                weigh_values_narrow(
                    n, weights, from_row, SEGMENT, values, first, end, dim, d, ahead, sums, to
                )
                d += 32
            ahead = empty(ahead)
        row += n
