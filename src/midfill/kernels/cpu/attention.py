"""Attention over scattered slots, for decodes and prefill chunks alike.

The keys of a request are cut into segments of 256, counted from its first key. For a tile of
query rows (all query heads that share a KV head together) each segment gives scores [rows, 256],
their maximum, the sum of their exponentials and a weighted sum of V; segments are merged in order
(online softmax: Milakov and Gimelshein, 2018). The cuts depend on nothing but the position of a
key, so an answer does not depend on how the prompt was chunked. Where few rows meet a long
context, threads share a request's segments among them and merge afterwards (as Flash-Decoding
does, Dao et al., 2023), with the same sums in the same order.

Work on a segment's cells is in segments.py.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.cell_kernels import MAX_CELL_ROWS
from midfill.kernels.cpu.cells import is_coded
from midfill.kernels.cpu.dots import round_row
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.linear import rounded_at
from midfill.kernels.cpu.segments import (
    BLOCK,
    SEGMENT,
    add_segment,
    multiply_scales,
    score_segment,
)
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
from midfill.kernels.cpu.team import take_work

TILE_ROWS = 32
"""Most query rows times group heads that a tile holds."""

# Columns of an attention item, see plan_attention.
REQUEST, ROW, ROWS, PARTIAL = 0, 1, 2, 3
ITEM_FIELDS = 4

_MINUS_INFINITY = np.float32(-np.inf)


@entry_point
def plan_attention(
    query_indptr: Any, kv_indptr: Any, group: int, kv_heads: int, threads: int, items: Any
) -> tuple[int, int]:
    """Cut the batch's rows into tiles; a tile and a KV head are one item of work.

    Returns (tiles, partials): where there are too few tiles to keep the threads busy, partials
    is the number of (tile, segment) pairs, each computed apart and merged afterwards; else 0.
    items: int32 [tiles, 4]: request, first row, rows, first partial.
    """
    widest = max(1, TILE_ROWS // group)
    while widest > 1 and widest * group % MAX_CELL_ROWS != 0:
        widest -= 1
    tiles = 0
    partials = 0
    for request in range(len(query_indptr) - 1):
        row, end = query_indptr[request], query_indptr[request + 1]
        length = kv_indptr[request + 1] - kv_indptr[request]
        while row < end:
            count = min(widest, end - row)
            items[tiles, REQUEST] = request
            items[tiles, ROW] = row
            items[tiles, ROWS] = count
            items[tiles, PARTIAL] = partials
            keys = length - (end - row - count)
            partials += (keys + SEGMENT - 1) // SEGMENT
            tiles += 1
            row += count
    if tiles * kv_heads >= 4 * threads or threads == 1:
        partials = 0
    return tiles, partials


@kernel
def _softmax_row(
    scores: Any, at: int, count: int, first: int, end: int, state: Any, row: int
) -> None:
    """Turn a row's scores of ``count`` keys into exponentials, of keys first <= j < end alone.

    state[row] = their maximum, before the exponential, and their sum.
    """
    peaks = splat(_MINUS_INFINITY)
    for part in range(0, count, LANES):
        seen = keep_lanes(load(scores, at + part), first - part, end - part, _MINUS_INFINITY)
        store(scores, at + part, seen)
        peaks = maximum(peaks, seen)
    peak = max_lanes(peaks)
    # A row that sees nothing here: any number will do that keeps exp away from inf - inf.
    shift = splat(peak if peak > _MINUS_INFINITY else np.float32(0.0))
    total = splat(np.float32(0.0))
    for part in range(0, count, LANES):
        weight = exp(subtract(load(scores, at + part), shift))
        store(scores, at + part, weight)
        total = add(total, weight)
    state[row * 2] = peak
    state[row * 2 + 1] = sum_lanes(total)


@kernel
def _clear_totals(totals: Any, total_sums: Any, rows: int, head_dim: int) -> None:
    zero = splat(np.float32(0.0))
    for row in range(rows):
        totals[row * 2] = _MINUS_INFINITY
        totals[row * 2 + 1] = np.float32(0.0)
    for i in range(0, rows * head_dim, LANES):
        store(total_sums, i, zero)


@kernel
def _attend_segment(
    cells: Any, head_at: int, slots: Any, slots_at: int, segment: int, length: int,
    first_limit: int, window: int, group: int, head_dim: int, queries: Any, rows: int,
    floats: Any, scores: Any, scales: Any, state: Any, sums: Any,
) -> None:  # fmt: skip
    """Attention of a tile over one segment into state [rows, 2] and sums [rows, head_dim].

    Row r belongs to query row r // group, which sees keys up to first_limit + r // group
    (exclusive) and, with a window, only that many of the last ones. head_at: cells before those
    of this layer and head.
    """
    _clear_totals(state, sums, rows, head_dim)
    start = segment * SEGMENT
    count = min(SEGMENT, length - start)
    behind = length - start - count
    base, first_slot = head_at * head_dim, slots_at + start
    score_segment(cells, base, slots, first_slot, count, head_dim, queries, rows, floats, scores)
    if is_coded(cells.keys):
        multiply_scales(cells.key_scales, head_at, slots, first_slot, count, scales, rows, scores)
    for row in range(rows):
        limit = first_limit + row // group - start
        first = max(0, limit - window) if window > 0 else 0
        _softmax_row(scores, row * SEGMENT, count, first, limit, state, row)
    if is_coded(cells.values):
        multiply_scales(cells.value_scales, head_at, slots, first_slot, count, scales, rows, scores)
    add_segment(cells, base, slots, first_slot, count, behind, head_dim, scores, rows, floats, sums)


@kernel
def _merge_row(
    total: Any, total_at: int, total_sums: Any, total_sums_at: int, part: Any, part_at: int,
    part_sums: Any, part_sums_at: int, head_dim: int,
) -> None:  # fmt: skip
    """Merge one row's segment into what came before it."""
    if part[part_at] == _MINUS_INFINITY:
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
def _finish_row(state: Any, row: int, sums: Any, head_dim: int, out: Any, out_at: int) -> None:
    """out = weighted V over the sum of weights."""
    divisor = splat(state[row * 2 + 1])
    for d in range(0, head_dim, LANES):
        store(out, out_at + d, divide(load(sums, row * head_dim + d), divisor))


@kernel
def _load_queries(
    qkv: Any, qkv_stride: int, row: int, rows: int, group: int, head: int, head_dim: int,
    scale: float, queries: Any,
) -> None:  # fmt: skip
    """queries[rows, head_dim] = the tile's query heads of one KV head, times the score scale."""
    factor = splat(np.float32(scale))
    for r in range(rows):
        at = (row + r // group) * qkv_stride + (head * group + r % group) * head_dim
        for d in range(0, head_dim, LANES):
            store(queries, r * head_dim + d, multiply(load(qkv, at + d), factor))


@kernel
def _merge_tile(
    total: Any, total_sums: Any, part: Any, part_at: int, part_sums: Any, rows: int, head_dim: int
) -> None:
    """Merge a segment's rows, which start at row ``part_at`` of part, into what came before."""
    for r in range(rows):
        _merge_row(
            total, r * 2, total_sums, r * head_dim, part, (part_at + r) * 2, part_sums,
            (part_at + r) * head_dim, head_dim,
        )  # fmt: skip


@kernel
def _finish_tile(
    totals: Any, total_sums: Any, row: int, rows: int, group: int, head: int, query_heads: int,
    head_dim: int, out: Any, rounded: Any,
) -> None:  # fmt: skip
    """Write a tile's finished rows to out[rows, query_heads * head_dim] and to ``rounded``."""
    for r in range(rows):
        at = ((row + r // group) * query_heads + head * group + r % group) * head_dim
        _finish_row(totals, r, total_sums, head_dim, out, at)
        if len(rounded) > 0:
            round_row(out, at, head_dim, rounded, rounded_at(at))


@kernel
def attend(
    sync: Any, items: Any, tiles: int, partials: int, query_indptr: Any, kv_indptr: Any,
    kv_slots: Any, qkv: Any, qkv_stride: int, cells: Any, layer_at: int, slots: int,
    query_heads: int, kv_heads: int, head_dim: int, scale: float, window: int, out: Any,
    rounded: Any, scratch: Any, partial_state: Any, partial_sums: Any,
) -> None:  # fmt: skip
    """One phase: all items (tile, KV head), or (tile, KV head, segment) where partials > 0.

    qkv: float32 [rows, qkv_stride], rotated queries first. cells: decoder.Cells with ``slots``
    cells a head, those of this layer from cell layer_at on. out: float32
    [rows, query_heads * head_dim]; rounded: the same as blocks of dots.py, if it is not empty.
    scratch: this thread's, see scratch_size. partial_*: one entry
    a (partial, head): [32, 2] and [32, head_dim] float32.
    """
    group = query_heads // kv_heads
    most = max(TILE_ROWS, group)
    queries, rest = scratch[: most * head_dim], scratch[most * head_dim :]
    floats, rest = rest[: head_dim * BLOCK], rest[head_dim * BLOCK :]
    scores, rest = rest[: most * SEGMENT], rest[most * SEGMENT :]
    sums, rest = rest[: most * head_dim], rest[most * head_dim :]
    total_sums, rest = rest[: most * head_dim], rest[most * head_dim :]
    state, totals, scales = rest[: most * 2], rest[most * 2 : most * 4], rest[most * 4 :]
    split = partials > 0
    count = (partials if split else tiles) * kv_heads
    while True:
        work = take_work(sync, 1)
        if work >= count:
            break
        head = work % kv_heads
        tile_index = work // kv_heads
        segment = 0
        if split:
            partial = tile_index
            tile_index = tiles - 1
            while items[tile_index, PARTIAL] > partial:
                tile_index -= 1
            segment = partial - items[tile_index, PARTIAL]
        else:
            # Long tiles come last in a prompt; starting with them evens out the end.
            tile_index = tiles - 1 - tile_index
        request, row = items[tile_index, REQUEST], items[tile_index, ROW]
        query_rows = items[tile_index, ROWS]
        rows = query_rows * group
        behind = query_indptr[request + 1] - row
        length = kv_indptr[request + 1] - kv_indptr[request] - behind + query_rows
        first_limit = length - query_rows + 1
        head_at = layer_at + head * slots
        _load_queries(qkv, qkv_stride, row, rows, group, head, head_dim, scale, queries)
        if split:
            entry = work * most
            _attend_segment(
                cells, head_at, kv_slots, kv_indptr[request], segment, length, first_limit,
                window, group, head_dim, queries, rows, floats, scores, scales,
                partial_state[entry * 2 :], partial_sums[entry * head_dim :],
            )  # fmt: skip
            continue
        _clear_totals(totals, total_sums, rows, head_dim)
        for segment in range((length + SEGMENT - 1) // SEGMENT):
            if window > 0 and (segment + 1) * SEGMENT <= first_limit - window:
                continue
            _attend_segment(
                cells, head_at, kv_slots, kv_indptr[request], segment, length, first_limit,
                window, group, head_dim, queries, rows, floats, scores, scales, state, sums,
            )  # fmt: skip
            _merge_tile(totals, total_sums, state, 0, sums, rows, head_dim)
        _finish_tile(
            totals, total_sums, row, rows, group, head, query_heads, head_dim, out, rounded
        )


@kernel
def merge_partials(
    sync: Any, items: Any, tiles: int, partials: int, query_heads: int, kv_heads: int,
    head_dim: int, out: Any, rounded: Any, scratch: Any, partial_state: Any, partial_sums: Any,
) -> None:  # fmt: skip
    """One phase after ``attend`` with partials > 0: merge each tile's segments in order."""
    group = query_heads // kv_heads
    most = max(TILE_ROWS, group)
    total_sums, totals = scratch[: most * head_dim], scratch[most * head_dim :]
    while True:
        work = take_work(sync, 1)
        if work >= tiles * kv_heads:
            break
        head, tile_index = work % kv_heads, work // kv_heads
        rows = items[tile_index, ROWS] * group
        first = items[tile_index, PARTIAL]
        last = items[tile_index + 1, PARTIAL] if tile_index + 1 < tiles else partials
        _clear_totals(totals, total_sums, rows, head_dim)
        for partial in range(first, last):
            entry = (partial * kv_heads + head) * most
            _merge_tile(totals, total_sums, partial_state, entry, partial_sums, rows, head_dim)
        row = items[tile_index, ROW]
        _finish_tile(
            totals, total_sums, row, rows, group, head, query_heads, head_dim, out, rounded
        )


def scratch_size(group: int, head_dim: int) -> int:
    """float32 a thread needs for ``attend``."""
    most = max(TILE_ROWS, group)
    return (
        3 * most * head_dim  # queries, sums, totals
        + head_dim * BLOCK  # floats
        + most * SEGMENT  # scores
        + 4 * most  # state, totals
        + LANES  # scales
    )
