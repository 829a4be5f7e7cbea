"""What a layer's last rows attend to, and the mean keys of blocks: what lists are chosen by."""

import numpy as np

from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.kv_cache import LayerKV, is_quantized
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.segments import multiply_scales, weigh_segment
from midfill.kernels.cpu.simd import LANES, add, exp, load, max_lanes, multiply, splat, store
from midfill.kernels.cpu.softmax import softmax_row
from midfill.kernels.cpu.sparse.requests import (
    BlockScratch,
    SparseRequest,
    cut_scratch,
    load_queries,
    score_block,
)
from midfill.kernels.cpu.thread_pool import barrier, take_work


@kernel
def _weigh_keys(
    kv: LayerKV, heads: AttentionHeads, request: SparseRequest, head: int, memory: BlockScratch,
    weights: Float32Array, states: Float32Array,
) -> None:  # fmt: skip
    """Compute the softmax weights of a head's rows, as they are before they are merged.

    Args:
        kv, heads, request: see ``probe_masses``.
        head: the query head.
        memory: holds the queries.
        weights: float32 [segments * rows * 256].
        states: float32 [segments * rows * 2], see ``SoftmaxSums.states``.
    """
    rows, keys = request.rows, request.position + request.rows
    for start in range(0, keys, SEGMENT):
        at = start * rows
        count = min(SEGMENT, keys - start)
        limit = request.position + 1 - start
        scores = weights[at : at + rows * SEGMENT]
        score_block(
            kv, heads, head // heads.group, memory.queries,
            SegmentRows(rows, 1, limit, 0, heads.head_dim, request.slots[:0], 0, 0), request.slots,
            start, count, memory, scores,
        )  # fmt: skip
        first = start // SEGMENT * rows
        for row in range(rows):
            softmax_row(scores, row * SEGMENT, count, 0, limit + row, states, first + row)


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
            share = max_lanes(exp(splat(states[state] - peak)))
            total += states[state + 1] * share
            states[state] = share
        for segment in range(segments):
            state = 2 * (segment * rows + row)
            states[state + 1] = states[state] / total


@kernel
def _add_weights(
    weights: Float32Array, states: Float32Array, rows: int, keys: int, columns: Float32Array,
    diagonals: Float32Array, at: int,
) -> None:  # fmt: skip
    """Add the weights of all rows to columns[at:] and, turned round, to diagonals[at:]."""
    for start in range(0, keys, SEGMENT):
        count = min(SEGMENT, keys - start)
        for row in range(rows):
            segment_row = start // SEGMENT * rows + row
            factor = splat(states[2 * segment_row + 1])
            scores, to = segment_row * SEGMENT, at + start
            turned = to + rows - 1 - row
            for i in range(0, count, LANES):
                weight = multiply(load(weights, scores + i), factor)
                store(columns, to + i, add(load(columns, to + i), weight))
                store(diagonals, turned + i, add(load(diagonals, turned + i), weight))


@entry_point
def probe_masses(
    thread: int, threads: int, sync: Int64Array, kv: LayerKV, heads: AttentionHeads,
    queries: Queries, request: SparseRequest, columns: Float32Array, diagonals: Float32Array,
    width: int, scratch: Float32Array, weights: Float32Array, states: Float32Array,
) -> None:  # fmt: skip
    """Compute how much attention rows pay to each key and to each distance.

    Args:
        thread, threads, sync: see ThreadPool.run.
        kv: the layer's KV, the batch's own rows written.
        heads: the layer's attention; it has no window.
        queries: of all rows of the batch.
        request: the rows, at most 64.
        columns: float32 [query_heads * width], zeros; takes the sums over the rows.
        diagonals: as columns; takes, for each key, the sums over the keys as far before their rows
            as this one is before the last row.
        width: at least the number of keys in whole vectors, and 64.
        scratch: float32 [threads, scratch_size(head_dim)].
        weights: float32 [threads, at least keys in whole segments * rows].
        states: float32 [threads, at least segments * rows * 2].
    """
    memory = cut_scratch(scratch[thread], heads.head_dim)
    keys = request.position + request.rows
    segments = (keys + SEGMENT - 1) // SEGMENT
    head = take_work(sync, 1)
    while head < heads.query_heads:
        load_queries(
            kv, queries.values, queries.stride, request.row, request.rows, head, heads,
            memory.queries,
        )  # fmt: skip
        _weigh_keys(kv, heads, request, head, memory, weights[thread], states[thread])
        _find_factors(states[thread], request.rows, segments)
        _add_weights(
            weights[thread], states[thread], request.rows, keys, columns, diagonals, head * width
        )
        head = take_work(sync, 1)
    barrier(sync, threads)


@entry_point
def mean_keys(
    thread: int, threads: int, sync: Int64Array, kv: LayerKV, heads: AttentionHeads,
    request: SparseRequest, size: int, means: Float32Array, scratch: Float32Array,
) -> None:  # fmt: skip
    """Compute the mean key of every ``size`` keys.

    Args:
        thread, threads, sync: see ThreadPool.run.
        kv: the layer's KV.
        heads: the layer's attention.
        request: whose keys; all up to its last row's.
        size: 32, 64 or 128.
        means: float32 [kv_heads * blocks in whole segments * head_dim].
        scratch: float32 [threads, scratch_size(head_dim)].
    """
    memory = cut_scratch(scratch[thread], heads.head_dim)
    keys, dim = request.position + request.rows, heads.head_dim
    segments, rows = (keys + SEGMENT - 1) // SEGMENT, SEGMENT // size
    unit = take_work(sync, 1)
    while unit < segments * heads.kv_heads:
        head, segment = unit // segments, unit % segments
        start = segment * SEGMENT
        count = min(SEGMENT, keys - start)
        memory.scores[: rows * SEGMENT] = np.float32(0.0)
        for row in range(rows):
            end = min(count, (row + 1) * size)
            for i in range(row * size, end):
                memory.scores[row * SEGMENT + i] = np.float32(1.0) / np.float32(end - row * size)
        base = kv.first_entry + head * kv.slots
        span = KVSpan(kv.cache.keys, base * dim, request.slots, start, count)
        if is_quantized(kv.cache.keys):
            multiply_scales(kv.cache.key_scales, base, span, memory.scales, rows, memory.scores)
        nothing = KVSpan(kv.cache.keys, base * dim, request.slots, start, count * 0)
        shape = SegmentRows(rows, 1, SEGMENT, 0, dim, request.slots[:0], 0, 0)
        weigh_segment(memory.scores, shape, span, nothing, means, unit * rows * dim)
        unit = take_work(sync, 1)
    barrier(sync, threads)
