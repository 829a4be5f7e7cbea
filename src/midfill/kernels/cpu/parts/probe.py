"""What a layer's last rows attend to, and the mean keys of blocks: what lists are chosen by."""

import numpy as np

from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.attention_parts import AttentionParts
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.kv_cache import LayerKV, is_quantized, transform_for
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array
from midfill.kernels.cpu.parts.keys import (
    Cursor,
    PartKeys,
    PartRows,
    PartScratch,
    change_scores,
    cut_scratch,
    gather_keys,
    list_of,
    load_queries,
    part_keys,
    score_span,
)
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows, keys_seen
from midfill.kernels.cpu.segments import multiply_scales, weigh_segment
from midfill.kernels.cpu.simd import LANES, add, exp, first_lane, load, multiply, splat, store
from midfill.kernels.cpu.softmax import softmax_row
from midfill.kernels.cpu.thread_pool import barrier, take_work


@kernel
def _gather_segment(
    parts: AttentionParts, part: PartKeys, start: int, keys: int, memory: PartScratch
) -> int:
    """Gather the keys of a part from number ``start`` on, to the scratch; return how many."""
    every, first = list_of(parts, -1), Cursor(0, start)
    count, _ = gather_keys(part, every, first, keys, memory.numbers, memory.cells, 0)
    return count


@kernel
def _weigh_keys(
    kv: LayerKV, heads: AttentionHeads, parts: AttentionParts, part: PartKeys, visible_at: int,
    keys: int, rows: int, memory: PartScratch, weights: Float32Array, states: Float32Array,
) -> None:  # fmt: skip
    """Compute the softmax weights of a head's rows, as they are before they are merged.

    Args:
        kv, heads, parts: see ``probe_masses``.
        visible_at, rows: see ``PartRows``.
        part: the part's keys in the head.
        keys: how many of them the last row sees.
        memory: holds the queries.
        weights: float32 [segments * rows * 256].
        states: float32 [segments * rows * 2], see ``SoftmaxSums.states``.
    """
    base = part.head.base * 0
    for start in range(0, keys, SEGMENT):
        at = start * rows
        count = _gather_segment(parts, part, start, keys, memory)
        scores = weights[at : at + rows * SEGMENT]
        shape = SegmentRows(
            rows, 1, 0, 0, heads.head_dim, parts.visible, visible_at, start - part.head.cells
        )
        span = KVSpan(kv.cache.keys, base, memory.cells, 0, count)
        score_span(kv, base, shape, span, memory, scores)
        if part.head.has_terms:
            change_scores(part, memory.numbers, 0, count, memory.gathered, rows, scores)
        first = start // SEGMENT * rows
        for row in range(rows):
            end = keys_seen(shape, row)
            softmax_row(scores, row * SEGMENT, count, 0, end, states, first + row)


@kernel
def _find_factors(states: Float32Array, rows: int, segments: int) -> None:
    """Replace each sum in ``states`` by what its weights are multiplied by to add up to 1."""
    for row in range(rows):
        peak = states[2 * row]
        for segment in range(1, segments):
            peak = max(peak, states[2 * (segment * rows + row)])
        total = np.float32(0.0)
        for segment in range(segments):
            state = 2 * (segment * rows + row)
            share = first_lane(exp(splat(states[state] - peak)))
            total += states[state + 1] * share
            states[state] = share
        for segment in range(segments):
            state = 2 * (segment * rows + row)
            states[state + 1] = states[state] / total


@kernel
def _add_weights(
    weights: Float32Array, states: Float32Array, visible: Int32Array, visible_at: int, rows: int,
    keys: int, columns: Float32Array, diagonals: Float32Array, at: int,
) -> None:  # fmt: skip
    """Add the weights of all rows to columns[at:] and, turned round, to diagonals[at:]."""
    last = visible[visible_at + rows - 1]
    for start in range(0, keys, SEGMENT):
        count = min(SEGMENT, keys - start)
        for row in range(rows):
            segment_row = start // SEGMENT * rows + row
            factor = splat(states[2 * segment_row + 1])
            scores, to = segment_row * SEGMENT, at + start
            turned = to + int(last - visible[visible_at + row])
            for i in range(0, count, LANES):
                weight = multiply(load(weights, scores + i), factor)
                store(columns, to + i, add(load(columns, to + i), weight))
                store(diagonals, turned + i, add(load(diagonals, turned + i), weight))


@entry_point
def probe_masses(
    thread: int, threads: int, sync: Int64Array, kv: LayerKV, heads: AttentionHeads,
    queries: Queries, parts: AttentionParts, own: PartRows, columns: Float32Array,
    diagonals: Float32Array, width: int, weights: Float32Array, states: Float32Array,
) -> None:  # fmt: skip
    """Compute how much attention rows pay to each key and to each distance.

    Args:
        thread, threads, sync: see ThreadPool.run.
        kv: the layer's KV, the batch's own rows written.
        heads: the layer's attention; it has no window.
        queries: of all rows of the batch.
        parts: of the batch.
        own: the rows, at most 64, and the part that is probed.
        columns: float32 [query_heads * width], zeros; takes the sums over the rows.
        diagonals: as columns; takes, for each key, the sums over the keys as far before their rows
            as this one is before the last row.
        width: at least the number of keys in whole vectors, and by how many slots the last row
            sees more than the first.
        weights: float32 [threads, at least keys in whole segments * rows].
        states: float32 [threads, at least segments * rows * 2].
    """
    memory = cut_scratch(parts.scratch[thread], parts.numbers[thread], heads.head_dim)
    visible, one_head = parts.visible, 1
    rows, visible_at = own.rows, own.visible_at
    head = take_work(sync, 1)
    while head < heads.query_heads:
        load_queries(kv, queries, own.row, rows, head, one_head, heads, heads.scale, memory.queries)
        part = part_keys(parts, own.part, kv, head // heads.group)
        keys = part.head.cells + int(visible[visible_at + rows - 1])
        own_weights, own_states = weights[thread], states[thread]
        _weigh_keys(kv, heads, parts, part, visible_at, keys, rows, memory, own_weights, own_states)
        _find_factors(own_states, rows, (keys + SEGMENT - 1) // SEGMENT)
        _add_weights(
            own_weights, own_states, visible, visible_at, rows, keys, columns, diagonals,
            head * width,
        )  # fmt: skip
        head = take_work(sync, 1)
    barrier(sync, threads)


@entry_point
def mean_keys(
    thread: int, threads: int, sync: Int64Array, kv: LayerKV, heads: AttentionHeads,
    parts: AttentionParts, part: int, keys: int, size: int, means: Float32Array,
) -> None:  # fmt: skip
    """Compute the mean key of every ``size`` keys of a part.

    Args:
        thread, threads, sync: see ThreadPool.run.
        kv: the layer's KV.
        heads: the layer's attention.
        parts: of the batch.
        part: number of the part.
        keys: how many of its keys.
        size: 32, 64 or 128.
        means: float32 [kv_heads * blocks in whole segments * head_dim].
    """
    memory = cut_scratch(parts.scratch[thread], parts.numbers[thread], heads.head_dim)
    dim, segments, rows = heads.head_dim, (keys + SEGMENT - 1) // SEGMENT, SEGMENT // size
    unit = take_work(sync, 1)
    while unit < segments * heads.kv_heads:
        head, start = unit // segments, unit % segments * SEGMENT
        own = part_keys(parts, part, kv, head)
        base = own.head.base * 0
        count = _gather_segment(parts, own, start, keys, memory)
        memory.scores[: rows * SEGMENT] = np.float32(0.0)
        for row in range(rows):
            end = min(count, (row + 1) * size)
            for i in range(row * size, end):
                memory.scores[row * SEGMENT + i] = np.float32(1.0) / np.float32(end - row * size)
        span = KVSpan(kv.cache.keys, base, memory.cells, 0, count)
        if is_quantized(kv.cache.keys):
            scales = kv.cache.key_scales
            multiply_scales(scales, base, span, rows, memory.scores)
        nothing = KVSpan(kv.cache.keys, base, memory.cells, 0, count * 0)
        shape = SegmentRows(rows, 1, SEGMENT, 0, dim, memory.ends[:0], 0, 0)
        weigh_segment(memory.scores, shape, span, nothing, means, unit * rows * dim)
        for row in range(rows):
            transform_for(kv.cache.keys, means, (unit * rows + row) * dim, dim)
        unit = take_work(sync, 1)
    barrier(sync, threads)
