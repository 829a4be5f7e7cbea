"""Attention over scattered slots, for decodes and prefill chunks alike.

The keys of a request are cut into segments of 256 and blocks of 64, counted from its first key.
For a tile of query rows (all query heads that share a KV head together) each block gives scores
[rows, 64]; a segment keeps a running maximum, sum and weighted V (online softmax: Milakov and
Gimelshein, 2018), and segments are merged in order. The cuts depend on nothing but the position
of a key, so an answer does not depend on how the prompt was chunked. Where few rows meet a long
context, threads share a request's segments among them and merge afterwards (as Flash-Decoding
does, Dao et al., 2023), with the same sums in the same order.

K is turned into panels [head_dim, 32 keys] in cache-sized scratch, block by block; V is read in
place while slots are consecutive.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.linear import MAX_TILE_ROWS, multiply_floats
from midfill.kernels.cpu.packing import PANEL
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
    transpose_cells,
)
from midfill.kernels.cpu.team import take_work

BLOCK = 64
SEGMENT = 256
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
    while widest > 1 and widest * group % MAX_TILE_ROWS != 0:
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
def _load_keys(
    cells: Any, base: int, slots: Any, first: int, count: int, stride: int,
    head_dim: int, keys: Any,
) -> None:  # fmt: skip
    """keys = two panels [head_dim, 32]: K of up to 64 slots, transposed.

    Columns past ``count`` repeat some key of the block; their scores are masked.
    """
    for part in range(0, count, LANES):
        panel = (part // PANEL) * head_dim * PANEL + part % PANEL
        for d in range(0, head_dim, LANES):
            transpose_cells(
                cells, base + d, slots, first + part, count - part, stride, keys,
                panel + d * PANEL, PANEL,
            )  # fmt: skip


@kernel
def _softmax_row(
    scores: Any, row: int, rows: int, first: int, end: int, state: Any, sums: Any, sums_at: int,
    head_dim: int, weights: Any,
) -> None:  # fmt: skip
    """Turn one row's 64 scores into weights and scale what was summed before.

    scores: [2, rows, 32]; keys first <= j < end of the block count. state: [rows, 2], maximum
    and sum. weights: [rows, 64].
    """
    at = row * BLOCK
    if end <= first:
        zero = splat(np.float32(0.0))
        for j in range(0, BLOCK, LANES):
            store(weights, at + j, zero)
        return
    low, high = row * PANEL, (rows + row) * PANEL
    s0 = keep_lanes(load(scores, low), first, end, _MINUS_INFINITY)
    s1 = keep_lanes(load(scores, low + LANES), first - 16, end - 16, _MINUS_INFINITY)
    s2 = keep_lanes(load(scores, high), first - 32, end - 32, _MINUS_INFINITY)
    s3 = keep_lanes(load(scores, high + LANES), first - 48, end - 48, _MINUS_INFINITY)
    before = state[row * 2]
    peak = max(before, max_lanes(maximum(maximum(s0, s1), maximum(s2, s3))))
    shift = splat(peak)
    p0, p1 = exp(subtract(s0, shift)), exp(subtract(s1, shift))
    p2, p3 = exp(subtract(s2, shift)), exp(subtract(s3, shift))
    total = sum_lanes(add(add(p0, p1), add(p2, p3)))
    if before != peak:
        decay = exp(splat(before - peak))
        state[row * 2] = peak
        state[row * 2 + 1] = max_lanes(decay) * state[row * 2 + 1] + total
        for d in range(0, head_dim, LANES):
            cell = sums_at + row * head_dim + d
            store(sums, cell, multiply(load(sums, cell), decay))
    else:
        state[row * 2 + 1] = np.float32(1.0) * state[row * 2 + 1] + total
    store(weights, at, p0)
    store(weights, at + 16, p1)
    store(weights, at + 32, p2)
    store(weights, at + 48, p3)


@kernel
def _add_values(
    cells: Any, base: int, slots: Any, first: int, count: int, stride: int,
    head_dim: int, weights: Any, rows: int, values: Any, sums: Any, tile: Any,
) -> None:  # fmt: skip
    """sums[rows, head_dim] += weights[rows, count] @ V of ``count`` slots."""
    consecutive = slots[first + count - 1] - slots[first] == count - 1
    if consecutive:
        for j in range(1, count):
            if slots[first + j] != slots[first] + j:
                consecutive = False
                break
    if not consecutive:
        for j in range(count):
            cell = base + slots[first + j] * stride
            for d in range(0, head_dim, LANES):
                store(values, j * head_dim + d, load(cells, cell + d))
    start = base + slots[first] * stride
    for d in range(0, head_dim, PANEL):
        row = 0
        while row < rows:
            n = min(MAX_TILE_ROWS, rows - row)
            if consecutive:
                multiply_floats(
                    weights, row * BLOCK, BLOCK, n, count, cells, start + d, stride, tile, 0
                )
            else:
                multiply_floats(weights, row * BLOCK, BLOCK, n, count, values, d, head_dim, tile, 0)
            for r in range(n):
                for lane in range(0, PANEL, LANES):
                    cell = (row + r) * head_dim + d + lane
                    store(sums, cell, add(load(sums, cell), load(tile, r * PANEL + lane)))
            row += n


@kernel
def _attend_segment(
    keys_cells: Any, values_cells: Any, layer_at: int, slots: Any, slots_at: int, segment: int,
    length: int, first_limit: int, window: int, group: int, stride: int, head_at: int,
    head_dim: int, queries: Any, rows: int, keys: Any, values: Any, scores: Any, weights: Any,
    state: Any, sums: Any, tile: Any,
) -> None:  # fmt: skip
    """Attention of a tile over one segment into state [rows, 2] and sums [rows, head_dim].

    Row r belongs to query row r // group, which sees keys up to first_limit + r // group
    (exclusive) and, with a window, only that many of the last ones.
    """
    for row in range(rows):
        state[row * 2] = _MINUS_INFINITY
        state[row * 2 + 1] = np.float32(0.0)
    zero = splat(np.float32(0.0))
    for i in range(0, rows * head_dim, LANES):
        store(sums, i, zero)
    end_of_segment = min((segment + 1) * SEGMENT, length)
    for block in range(segment * SEGMENT, end_of_segment, BLOCK):
        count = min(BLOCK, end_of_segment - block)
        if window > 0 and block + count <= first_limit - window:
            continue
        base, first_key = layer_at + head_at, slots_at + block
        _load_keys(keys_cells, base, slots, first_key, count, stride, head_dim, keys)
        panels = (count + PANEL - 1) // PANEL
        for panel in range(panels):
            row = 0
            while row < rows:
                n = min(MAX_TILE_ROWS, rows - row)
                multiply_floats(
                    queries, row * head_dim, head_dim, n, head_dim, keys,
                    panel * head_dim * PANEL, PANEL, scores, (panel * rows + row) * PANEL,
                )  # fmt: skip
                row += n
        for row in range(rows):
            limit = first_limit + row // group
            first = max(0, limit - window - block) if window > 0 else 0
            _softmax_row(
                scores, row, rows, first, min(count, limit - block), state, sums, 0, head_dim,
                weights,
            )  # fmt: skip
        _add_values(
            values_cells, base, slots, first_key, count, stride, head_dim,
            weights, rows, values, sums, tile,
        )  # fmt: skip


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
def _clear_totals(totals: Any, total_sums: Any, rows: int, head_dim: int) -> None:
    zero = splat(np.float32(0.0))
    for row in range(rows):
        totals[row * 2] = _MINUS_INFINITY
        totals[row * 2 + 1] = np.float32(0.0)
    for i in range(0, rows * head_dim, LANES):
        store(total_sums, i, zero)


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
    head_dim: int, out: Any,
) -> None:  # fmt: skip
    """Write a tile's finished rows to out[rows, query_heads * head_dim]."""
    for r in range(rows):
        at = ((row + r // group) * query_heads + head * group + r % group) * head_dim
        _finish_row(totals, r, total_sums, head_dim, out, at)


@kernel
def attend(
    sync: Any, items: Any, tiles: int, partials: int, query_indptr: Any, kv_indptr: Any,
    kv_slots: Any, qkv: Any, qkv_stride: int, keys_cells: Any, values_cells: Any, layer_at: int,
    query_heads: int, kv_heads: int, head_dim: int, scale: float, window: int, out: Any,
    scratch: Any, partial_state: Any, partial_sums: Any,
) -> None:  # fmt: skip
    """One phase: all items (tile, KV head), or (tile, KV head, segment) where partials > 0.

    qkv: float32 [rows, qkv_stride], rotated queries first. cells: float32, this layer's from
    layer_at, one slot kv_heads * head_dim apart. out: float32 [rows, query_heads * head_dim].
    scratch: this thread's, see scratch_size. partial_*: one entry a (partial, head): [32, 2]
    and [32, head_dim] float32.
    """
    group = query_heads // kv_heads
    most = max(TILE_ROWS, group)
    queries, rest = scratch[: most * head_dim], scratch[most * head_dim :]
    keys, rest = rest[: head_dim * BLOCK], rest[head_dim * BLOCK :]
    values, rest = rest[: head_dim * BLOCK], rest[head_dim * BLOCK :]
    scores, rest = rest[: most * BLOCK], rest[most * BLOCK :]
    weights, rest = rest[: most * BLOCK], rest[most * BLOCK :]
    sums, rest = rest[: most * head_dim], rest[most * head_dim :]
    total_sums, rest = rest[: most * head_dim], rest[most * head_dim :]
    state, totals, tile = rest[: most * 2], rest[most * 2 : most * 4], rest[most * 4 :]
    stride = kv_heads * head_dim
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
        _load_queries(qkv, qkv_stride, row, rows, group, head, head_dim, scale, queries)
        if split:
            entry = work * most
            _attend_segment(
                keys_cells, values_cells, layer_at, kv_slots, kv_indptr[request], segment, length,
                first_limit, window, group, stride, head * head_dim, head_dim, queries, rows,
                keys, values, scores, weights, partial_state[entry * 2 :],
                partial_sums[entry * head_dim :], tile,
            )  # fmt: skip
            continue
        _clear_totals(totals, total_sums, rows, head_dim)
        for segment in range((length + SEGMENT - 1) // SEGMENT):
            if window > 0 and (segment + 1) * SEGMENT <= first_limit - window:
                continue
            _attend_segment(
                keys_cells, values_cells, layer_at, kv_slots, kv_indptr[request], segment, length,
                first_limit, window, group, stride, head * head_dim, head_dim, queries, rows,
                keys, values, scores, weights, state, sums, tile,
            )  # fmt: skip
            _merge_tile(totals, total_sums, state, 0, sums, rows, head_dim)
        _finish_tile(totals, total_sums, row, rows, group, head, query_heads, head_dim, out)


@kernel
def merge_partials(
    sync: Any, items: Any, tiles: int, partials: int, query_heads: int, kv_heads: int,
    head_dim: int, out: Any, scratch: Any, partial_state: Any, partial_sums: Any,
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
        _finish_tile(totals, total_sums, row, rows, group, head, query_heads, head_dim, out)


def scratch_size(group: int, head_dim: int) -> int:
    """float32 a thread needs for ``attend``."""
    most = max(TILE_ROWS, group)
    return (
        3 * most * head_dim  # queries, sums, totals
        + 2 * head_dim * BLOCK  # keys, values
        + 2 * most * BLOCK  # scores, weights
        + 4 * most  # state, totals
        + MAX_TILE_ROWS * PANEL  # tile
    )
