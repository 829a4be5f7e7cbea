"""Attention over scattered slots, for decodes and prefill chunks alike.

The keys of a request are cut into segments of 256, counted from its first key, and merged in
order (softmax.py). The cuts depend on nothing but the position of a key, so an answer does not
depend on how the prompt was chunked. A tile is some query rows of a request, all query heads that
share a KV head together. Where few rows meet a long context, threads share a tile's segments
among them and merge afterwards (as Flash-Decoding does, Dao et al., 2023), with the same sums in
the same order.

Work on a segment's cells is in segments.py.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.cell_spans import CellSpan
from midfill.kernels.cpu.cells import is_coded
from midfill.kernels.cpu.dots import round_row
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.linear import rounded_at
from midfill.kernels.cpu.segments import SEGMENT, multiply_scales, score_segment, weigh_segment
from midfill.kernels.cpu.simd import LANES, load, multiply, splat, store
from midfill.kernels.cpu.softmax import clear_states, finish_row, merge_rows, softmax_row
from midfill.kernels.cpu.team import take_work

TILE_ROWS = 96
"""Most query rows times group heads that a tile holds."""

# Columns of an attention item, see plan_attention.
REQUEST, ROW, ROWS, PARTIAL = 0, 1, 2, 3
ITEM_FIELDS = 4

Float32 = npt.NDArray[np.float32]


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


class _Heads(NamedTuple):
    """Sizes of the model's attention; ``first_cell``: cells before those of the layer."""

    query_heads: int
    group: int
    kv_heads: int
    head_dim: int
    window: int
    slots: int
    first_cell: int


class _Rows(NamedTuple):
    """The rows of the batch; see ForwardBatch."""

    items: npt.NDArray[np.int32]
    tiles: int
    partials: int
    query_indptr: npt.NDArray[np.int32]
    kv_indptr: npt.NDArray[np.int32]
    kv_slots: npt.NDArray[np.int32]


class _Tile(NamedTuple):
    """An item of work: some rows of a request with one KV head, and segments of its keys.

    Attributes:
        row: the batch's first.
        rows: query rows times the heads of a group; row r belongs to query row r // group.
        head: the KV head.
        slots_at: where in kv_slots the request's slots start.
        length: keys that the last row sees.
        limit: keys that the first row sees.
        first, end: the segments, without those that lie before every row's window.
    """

    row: int
    rows: int
    head: int
    slots_at: int
    length: int
    limit: int
    first: int
    end: int


class _Scratch(NamedTuple):
    """A thread's memory for a tile of at most ``most`` rows.

    queries, sums and total_sums: [most, head_dim]; states and totals: [most, 2]; scores:
    [most, 256]; panel: [head_dim, 16]; scales: [16].
    """

    queries: Float32
    sums: Float32
    total_sums: Float32
    states: Float32
    totals: Float32
    scores: Float32
    panel: Float32
    scales: Float32


def scratch_size(group: int, head_dim: int) -> int:
    """float32 a thread needs for ``attend``."""
    most = max(TILE_ROWS, group)
    return 3 * most * head_dim + 2 * most * 2 + most * SEGMENT + head_dim * LANES + LANES


@kernel
def _cut(scratch: Any, group: int, head_dim: int) -> Any:
    most = max(TILE_ROWS, group)
    rows, states = most * head_dim, most * 2
    queries, rest = scratch[:rows], scratch[rows:]
    sums, rest = rest[:rows], rest[rows:]
    total_sums, rest = rest[:rows], rest[rows:]
    scores, rest = rest[: most * SEGMENT], rest[most * SEGMENT :]
    panel, rest = rest[: head_dim * LANES], rest[head_dim * LANES :]
    scales, rest = rest[:LANES], rest[LANES:]
    return _Scratch(
        queries, sums, total_sums, rest[:states], rest[states : 2 * states], scores, panel, scales
    )


@kernel
def _find_tile(rows: Any, heads: Any, work: int) -> Any:
    """Item number ``work``: (tile, KV head), or (tile, segment, KV head) where partials > 0."""
    index, head = work // heads.kv_heads, work % heads.kv_heads
    part = 0
    if rows.partials > 0:
        tile = rows.tiles - 1
        while rows.items[tile, PARTIAL] > index:
            tile -= 1
        part = index - rows.items[tile, PARTIAL]
    else:
        # Long tiles come last in a prompt; starting with them evens out the end.
        tile = rows.tiles - 1 - index
    request, row, count = rows.items[tile, REQUEST], rows.items[tile, ROW], rows.items[tile, ROWS]
    slots_at = rows.kv_indptr[request]
    behind = rows.query_indptr[request + 1] - row
    length = rows.kv_indptr[request + 1] - slots_at - behind + count
    limit = length - count + 1
    first, end = 0, (length + SEGMENT - 1) // SEGMENT
    if heads.window > 0:
        first = max(0, limit - heads.window) // SEGMENT
    if rows.partials > 0:
        first, end = max(first, part), part + 1
    return _Tile(row, count * heads.group, head, slots_at, length, limit, first, end)


@kernel
def _span(cells: Any, heads: Any, rows: Any, tile: Any, segment: int) -> Any:
    """The cells of a tile's segment; none where there is no such segment."""
    base = (heads.first_cell + tile.head * heads.slots) * heads.head_dim
    start = segment * SEGMENT
    count = min(SEGMENT, tile.length - start) if segment < tile.end else 0
    return CellSpan(cells, base, rows.kv_slots, tile.slots_at + start, count)


@kernel
def _load_queries(
    qkv: Any, qkv_stride: int, heads: Any, tile: Any, scale: float, queries: Any
) -> None:
    """queries[rows, head_dim] = the tile's query heads of its KV head, times the score scale."""
    group, head_dim = heads.group, heads.head_dim
    factor = splat(np.float32(scale))
    for r in range(tile.rows):
        at = (tile.row + r // group) * qkv_stride + (tile.head * group + r % group) * head_dim
        for d in range(0, head_dim, LANES):
            store(queries, r * head_dim + d, multiply(load(qkv, at + d), factor))


@kernel
def _attend_segment(
    cells: Any, heads: Any, rows: Any, tile: Any, segment: int, ahead: Any, scratch: Any,
    states: Any, sums: Any, at: int,
) -> None:  # fmt: skip
    """A tile's attention over one segment, to states and sums from row ``at`` on.

    Cells of the span ``ahead`` are fetched meanwhile.
    """
    dim, group, scores = heads.head_dim, heads.group, scratch.scores
    keys = _span(cells.keys, heads, rows, tile, segment)
    values = _span(cells.values, heads, rows, tile, segment)
    count, head_at = keys.length, heads.first_cell + tile.head * heads.slots
    limit = tile.limit - segment * SEGMENT
    score_segment(
        scratch.queries, tile.rows, group, limit, dim, keys, values, scratch.panel, scores
    )
    if is_coded(cells.keys):
        multiply_scales(
            cells.key_scales, head_at, keys.slots, keys.first, count, scratch.scales, tile.rows,
            scores,
        )  # fmt: skip
    for row in range(tile.rows):
        end = limit + row // group
        first = end - heads.window if heads.window > 0 else 0
        softmax_row(scores, row * SEGMENT, count, first, end, states, at + row)
    if is_coded(cells.values):
        multiply_scales(
            cells.value_scales, head_at, keys.slots, keys.first, count, scratch.scales, tile.rows,
            scores,
        )  # fmt: skip
    weigh_segment(scores, tile.rows, group, limit, heads.window, dim, values, ahead, sums, at * dim)


@kernel
def _attend_tile(cells: Any, heads: Any, rows: Any, tile: Any, after: Any, scratch: Any) -> None:
    """A tile's attention over all of its keys, to the totals; then comes the tile ``after``."""
    top: Any = np.int64(0)  # a literal would be a type of its own, and compiled for again
    for segment in range(tile.first, tile.end):
        ahead = _span(cells.keys, heads, rows, tile, segment + 1)
        if segment + 1 == tile.end:
            ahead = _span(cells.keys, heads, rows, after, after.first)
        if segment == tile.first:
            _attend_segment(
                cells, heads, rows, tile, segment, ahead, scratch, scratch.totals,
                scratch.total_sums, top,
            )  # fmt: skip
            continue
        _attend_segment(
            cells, heads, rows, tile, segment, ahead, scratch, scratch.states, scratch.sums, top
        )
        merge_rows(
            scratch.totals, scratch.total_sums, scratch.states, scratch.sums, top, tile.rows,
            heads.head_dim,
        )  # fmt: skip


@kernel
def _finish_tile(
    heads: Any, row: int, rows: int, head: int, scratch: Any, out: Any, rounded: Any
) -> None:
    """Write a tile's finished rows to out[rows, query_heads * head_dim] and to ``rounded``."""
    group, head_dim = heads.group, heads.head_dim
    for r in range(rows):
        at = ((row + r // group) * heads.query_heads + head * group + r % group) * head_dim
        finish_row(scratch.totals, r, scratch.total_sums, r * head_dim, head_dim, out, at)
        if len(rounded) > 0:
            round_row(out, at, head_dim, rounded, rounded_at(at))


@kernel
def attend(
    sync: Any, items: Any, tiles: int, partials: int, query_indptr: Any, kv_indptr: Any,
    kv_slots: Any, qkv: Any, qkv_stride: int, cells: Any, layer_at: int, slots: int,
    query_heads: int, kv_heads: int, head_dim: int, scale: float, window: int, out: Any,
    rounded: Any, scratch: Any, partial_state: Any, partial_sums: Any,
) -> None:  # fmt: skip
    """One phase: all items (tile, KV head), or (tile, segment, KV head) where partials > 0.

    qkv: float32 [rows, qkv_stride], rotated queries first. cells: decoder.Cells with ``slots``
    cells a head, those of this layer from cell layer_at on. out: float32
    [rows, query_heads * head_dim]; rounded: the same as blocks of dots.py, if it is not empty.
    scratch: this thread's, see scratch_size. partial_*: one entry
    a (partial, head): [TILE_ROWS, 2] and [TILE_ROWS, head_dim] float32.
    """
    group = query_heads // kv_heads
    heads = _Heads(query_heads, group, kv_heads, head_dim, window, slots, layer_at)
    rows = _Rows(items, tiles, partials, query_indptr, kv_indptr, kv_slots)
    memory = _cut(scratch, group, head_dim)
    count = (partials if partials > 0 else tiles) * kv_heads
    work = take_work(sync, 1)
    while work < count:
        # What comes next is known in time to fetch its keys.
        following = take_work(sync, 1)
        tile = _find_tile(rows, heads, work)
        after = _find_tile(rows, heads, min(following, count - 1))
        _load_queries(qkv, qkv_stride, heads, tile, scale, memory.queries)
        if partials == 0:
            _attend_tile(cells, heads, rows, tile, after, memory)
            _finish_tile(heads, tile.row, tile.rows, tile.head, memory, out, rounded)
        else:
            entry = work * max(TILE_ROWS, group)
            if tile.first < tile.end:
                ahead = _span(cells.keys, heads, rows, after, after.first)
                _attend_segment(
                    cells, heads, rows, tile, tile.first, ahead, memory, partial_state,
                    partial_sums, entry,
                )  # fmt: skip
            else:
                clear_states(partial_state, entry, tile.rows)
        work = following


@kernel
def merge_partials(
    sync: Any, items: Any, tiles: int, partials: int, query_heads: int, kv_heads: int,
    head_dim: int, out: Any, rounded: Any, scratch: Any, partial_state: Any, partial_sums: Any,
) -> None:  # fmt: skip
    """One phase after ``attend`` with partials > 0: merge each tile's segments in order."""
    group = query_heads // kv_heads
    heads = _Heads(query_heads, group, kv_heads, head_dim, 0, 0, 0)
    memory = _cut(scratch, group, head_dim)
    work = take_work(sync, 1)
    while work < tiles * kv_heads:
        head, tile = work % kv_heads, work // kv_heads
        rows = items[tile, ROWS] * group
        first = items[tile, PARTIAL]
        end = items[tile + 1, PARTIAL] if tile + 1 < tiles else partials
        clear_states(memory.totals, 0, rows)
        for partial in range(first, end):
            entry = (partial * kv_heads + head) * max(TILE_ROWS, group)
            merge_rows(
                memory.totals, memory.total_sums, partial_state, partial_sums, entry, rows, head_dim
            )
        _finish_tile(heads, items[tile, ROW], rows, head, memory, out, rounded)
        work = take_work(sync, 1)
