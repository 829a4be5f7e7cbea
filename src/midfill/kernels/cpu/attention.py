"""Attention over scattered slots, for decodes and prefill chunks alike.

The keys of a request are cut into segments of 256, counted from its first key, which are merged
in order (softmax.py). The cuts depend only on the position of a key, so an answer does not depend
on how the prompt was chunked. Where few rows meet a long context, the threads share the segments of
a query tile (attention_metadata.py) and merge them afterwards (as Flash-Decoding does, Dao et al.,
2023), with the same sums in the same order.

A request may see cells of its own in each layer and head before its slots (``RaggedIndex``). They
count as its first keys; their numbers are gathered segment by segment, and from there on nothing
differs. A ragged index that holds everything gives the same bits as the slots themselves.

The work on one segment is in segment_attention.py, the lists of cells in ragged_cells.py.
"""

from typing import Any, NamedTuple

import numpy as np

from midfill.kernels.cpu.activations import Activations, quantize
from midfill.kernels.cpu.attention_metadata import (
    MAX_TILE_ROWS,
    PARTIAL,
    ROW,
    ROWS,
    AttentionHeads,
    AttentionMetadata,
    Tile,
    find_tile,
)
from midfill.kernels.cpu.jit import entry_point, in_child, inlined_kernel, kernel
from midfill.kernels.cpu.kv_cache import KVArray, LayerKV, is_quantized, transform_for
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.pair_segments import panel_words
from midfill.kernels.cpu.ragged_cells import change_scores, list_cells
from midfill.kernels.cpu.segment_attention import (
    apply_value_factors,
    prepare_queries,
    score_keys,
    softmax_segment,
    weigh_values,
)
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.segments import multiply_scales
from midfill.kernels.cpu.simd import LANES, load, multiply, splat, store
from midfill.kernels.cpu.sinks import add_sink
from midfill.kernels.cpu.softmax import SoftmaxSums, clear_states, finish_row, merge_rows
from midfill.kernels.cpu.thread_pool import ThreadContext, take_work


class Queries(NamedTuple):
    """Rotated queries.

    Attributes:
        values: float32 [rows * stride], query_heads * head_dim of each row first.
        stride: elements from one row to the next.
    """

    values: Float32Array
    stride: int


class _Scratch(NamedTuple):
    """A thread's memory for a tile of at most ``most`` rows.

    Attributes:
        queries: float32 [most * head_dim], scaled, see ``prepare_queries``.
        totals: the segments merged so far, ``most`` rows.
        part: one segment, ``most`` rows.
        scores: float32 [most * 256].
        panel: float32 [panel_words(head_dim)], transposed keys or interleaved values.
        scales: float32 [32].
        cells: int32 [2 * 256], cells of a segment and of the one that is prefetched.
    """

    queries: Float32Array
    totals: SoftmaxSums
    part: SoftmaxSums
    scores: Float32Array
    panel: Float32Array
    scales: Float32Array
    cells: Int32Array


def scratch_size(group: int, head_dim: int) -> int:
    """Return how many float32 a thread needs for ``attend``."""
    most = max(MAX_TILE_ROWS, group)
    sums = 3 * most * head_dim + 2 * most * 2 + most * SEGMENT
    return sums + panel_words(head_dim) + 2 * LANES


@inlined_kernel
def _cut(scratch: Float32Array, cells: Int32Array, heads: AttentionHeads) -> _Scratch:
    """Cut a thread's memory into its parts."""
    most, head_dim = max(MAX_TILE_ROWS, heads.group), heads.head_dim
    rows, states = most * head_dim, most * 2
    queries, rest = scratch[:rows], scratch[rows:]
    sums, rest = rest[:rows], rest[rows:]
    total_sums, rest = rest[:rows], rest[rows:]
    scores, rest = rest[: most * SEGMENT], rest[most * SEGMENT :]
    scales, rest = rest[: 2 * LANES], rest[2 * LANES :]
    part = SoftmaxSums(rest[:states], sums)
    totals = SoftmaxSums(rest[states : 2 * states], total_sums)
    panel = rest[2 * states :]
    return _Scratch(queries, totals, part, scores, panel, scales, cells)


@inlined_kernel
def _span(
    entries: KVArray, head_dim: int, metadata: AttentionMetadata, tile: Tile, segment: int,
    cells: Int32Array, place: int,
) -> KVSpan:  # fmt: skip
    """Return the entries of a tile's segment; none if there is no such segment.

    Where some of its keys are cells, all are listed in cells[place:place + 256].
    """
    start = segment * SEGMENT
    count = min(SEGMENT, tile.length - start) if segment < tile.end else 0
    keys = tile.keys
    if keys.cells > 0:
        list_cells(metadata.ragged, metadata.kv_slots, keys, start, count, cells, place)
        return KVSpan(entries, keys.base * 0, cells, place, count)
    return KVSpan(entries, keys.base * head_dim, metadata.kv_slots, keys.slots_at + start, count)


@inlined_kernel
def _load_queries(
    queries: Queries, heads: AttentionHeads, tile: Tile, scaled: Float32Array
) -> None:
    """Copy the tile's queries of its KV head to scaled[rows, head_dim], times the score scale."""
    group, head_dim = heads.group, heads.head_dim
    factor = splat(np.float32(heads.scale))
    for r in range(tile.rows):
        head = tile.head * group + r % group
        at = (tile.row + r // group) * queries.stride + head * head_dim
        for d in range(0, head_dim, LANES):
            store(scaled, r * head_dim + d, multiply(load(queries.values, at + d), factor))


@kernel
def _attend_segment(
    kv: LayerKV, heads: AttentionHeads, metadata: AttentionMetadata, tile: Tile, segment: int,
    ahead: KVSpan, scratch: _Scratch, out: SoftmaxSums, first_row: int,
) -> None:  # fmt: skip
    """Compute a tile's attention over one segment, to ``out`` from ``first_row`` on.

    Entries of the span ``ahead`` are prefetched meanwhile.
    """
    dim, scores = heads.head_dim, scratch.scores
    keys = _span(kv.cache.keys, dim, metadata, tile, segment, scratch.cells, 0)
    values = KVSpan(kv.cache.values, keys.base, keys.slots, keys.first, keys.length)
    head_at = 0 if tile.keys.cells > 0 else tile.keys.base
    start = segment * SEGMENT
    rows = SegmentRows(
        tile.rows, heads.group, tile.limit - start, heads.window, dim, metadata.visible_slots,
        tile.row, start - tile.keys.cells,
    )  # fmt: skip
    score_keys(scratch.queries, rows, keys, values, scratch.panel, scores)
    if is_quantized(kv.cache.keys):
        multiply_scales(kv.cache.key_scales, head_at, keys, tile.rows, scores)
    if tile.keys.has_terms:
        change_scores(
            metadata.ragged, tile.keys, start, keys.length, scratch.scales, tile.rows, scores
        )
    softmax_segment(kv.cache.values, rows, keys.length, scores, out.states, first_row)
    if tile.keys.has_terms:
        apply_value_factors(
            kv.cache.values, metadata.ragged, tile.keys, start, keys.length, scratch.scales,
            tile.rows, scores,
        )  # fmt: skip
    if is_quantized(kv.cache.values):
        multiply_scales(kv.cache.value_scales, head_at, keys, tile.rows, scores)
    weigh_values(scores, rows, values, ahead, scratch.panel, out.sums, first_row * dim)


@inlined_kernel
def _attend_tile(
    kv: LayerKV, heads: AttentionHeads, metadata: AttentionMetadata, tile: Tile,
    following: Tile, scratch: _Scratch,
) -> None:  # fmt: skip
    """Compute a tile's attention over all of its keys, to the totals.

    The first keys of the tile ``following`` are prefetched during the last segment.
    """
    dim, cells = heads.head_dim, scratch.cells
    top: Any = np.int64(0)  # a literal would be a type of its own, and be compiled for again
    for segment in range(tile.first, tile.end):
        ahead = _span(kv.cache.keys, dim, metadata, tile, segment + 1, cells, SEGMENT)
        if segment + 1 == tile.end:
            ahead = _span(kv.cache.keys, dim, metadata, following, following.first, cells, SEGMENT)
        if segment == tile.first:
            _attend_segment(kv, heads, metadata, tile, segment, ahead, scratch, scratch.totals, top)
            continue
        _attend_segment(kv, heads, metadata, tile, segment, ahead, scratch, scratch.part, top)
        merge_rows(scratch.totals, scratch.part, top, tile.rows, dim)


@inlined_kernel
def _finish_tile(
    values: KVArray, heads: AttentionHeads, row: int, rows: int, head: int, totals: SoftmaxSums,
    out: Activations,
) -> None:  # fmt: skip
    """Write a tile's finished rows to out[batch rows, query_heads * head_dim]."""
    group, head_dim = heads.group, heads.head_dim
    for r in range(rows):
        query_head = head * group + r % group
        at = ((row + r // group) * heads.query_heads + query_head) * head_dim
        add_sink(heads, totals.states, r, query_head)
        finish_row(totals, r, head_dim, out.values, at)
        transform_for(values, out.values, at, head_dim)
    for query in range(row, row + rows // group):
        first_head = query * heads.query_heads + head * group
        quantize(out, first_head * head_dim, group * head_dim)


@in_child
@entry_point
def attend(
    context: ThreadContext, queries: Queries, kv: LayerKV, heads: AttentionHeads,
    metadata: AttentionMetadata, out: Activations, scratch: Float32Array, cells: Int32Array,
    partials: SoftmaxSums,
) -> None:  # fmt: skip
    """Run the attention of one layer, as one phase. Python calls it in tests only.

    With ``metadata.partials``, tiles are left in ``partials``, and ``merge_partials`` must follow.

    Args:
        context: this thread.
        queries: of all rows.
        kv: the layer's KV, the batch's own rows written.
        heads: the layer's attention, see ``sinks.layer_heads``.
        metadata: of the batch.
        out: [rows, query_heads * head_dim].
        scratch: float32 [scratch_size(...)], this thread's own.
        cells: int32 [2 * 256], this thread's own.
        partials: ``partial_rows(...)`` rows, shared.
    """
    memory = _cut(scratch, cells, heads)
    units = metadata.partials if metadata.partials > 0 else metadata.tile_count
    count = units * heads.kv_heads
    work = take_work(context.sync, 1)
    while work < count:
        # The next unit is claimed early, so that its keys can be prefetched.
        next_work = take_work(context.sync, 1)
        tile = find_tile(metadata, kv, heads, work)
        following = find_tile(metadata, kv, heads, min(next_work, count - 1))
        _load_queries(queries, heads, tile, memory.queries)
        prepare_queries(kv.cache.keys, memory.queries, tile.rows, heads.head_dim)
        if metadata.partials == 0:
            _attend_tile(kv, heads, metadata, tile, following, memory)
            _finish_tile(kv.cache.values, heads, tile.row, tile.rows, tile.head, memory.totals, out)
        else:
            first_row = work * max(MAX_TILE_ROWS, heads.group)
            if tile.first < tile.end:
                ahead = _span(
                    kv.cache.keys, heads.head_dim, metadata, following, following.first, cells,
                    SEGMENT,
                )  # fmt: skip
                _attend_segment(
                    kv, heads, metadata, tile, tile.first, ahead, memory, partials, first_row
                )
            else:
                clear_states(partials.states, first_row, tile.rows)
        work = next_work


@in_child
@entry_point
def merge_partials(
    context: ThreadContext, values: KVArray, heads: AttentionHeads, metadata: AttentionMetadata,
    out: Activations, scratch: Float32Array, cells: Int32Array, partials: SoftmaxSums,
) -> None:  # fmt: skip
    """Merge each tile's segments in order, as one phase after ``attend``; arguments as there.

    Args:
        values: V of the cache.
    """
    memory = _cut(scratch, cells, heads)
    tiles, kv_heads = metadata.tiles, heads.kv_heads
    work = take_work(context.sync, 1)
    while work < metadata.tile_count * kv_heads:
        head, tile = work % kv_heads, work // kv_heads
        rows = tiles[tile, ROWS] * heads.group
        first = tiles[tile, PARTIAL]
        end = tiles[tile + 1, PARTIAL] if tile + 1 < metadata.tile_count else metadata.partials
        clear_states(memory.totals.states, 0, rows)
        for partial in range(first, end):
            first_row = (partial * kv_heads + head) * max(MAX_TILE_ROWS, heads.group)
            merge_rows(memory.totals, partials, first_row, rows, heads.head_dim)
        _finish_tile(values, heads, tiles[tile, ROW], rows, head, memory.totals, out)
        work = take_work(context.sync, 1)
