"""Attention of a request's query blocks over listed keys.

A unit of work is one query block with one query head. Its keys, in order of position, are cut into
segments of 256, which are merged in order (softmax.py). A list of all keys thus gives the bits of
dense attention. What is not listed is neither read nor multiplied.
"""

from typing import Any, NamedTuple

import numpy as np

from midfill.kernels.cpu.activations import Activations, quantize
from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.kv_cache import LayerKV, is_quantized
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array
from midfill.kernels.cpu.segment_attention import softmax_segment, weigh_values
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.segments import multiply_scales
from midfill.kernels.cpu.softmax import finish_row, merge_rows
from midfill.kernels.cpu.sparse.requests import (
    BLOCK,
    BlockScratch,
    SparseRequest,
    cut_scratch,
    load_queries,
    score_block,
)
from midfill.kernels.cpu.thread_pool import barrier, take_work


class KeyLists(NamedTuple):
    """``runners.forward.sparse.SpanLists`` as the kernels see it.

    Attributes:
        indptr: int32 [blocks * query_heads + 1].
        spans: int32 [n * 2].
    """

    indptr: Int32Array
    spans: Int32Array


class _Cursor(NamedTuple):
    """How far a list has been read.

    Attributes:
        span: the span that is being read.
        end: the list's end.
        key: the next key.
    """

    span: int
    end: int
    key: int


@kernel
def _next_segment(
    lists: KeyLists, cursor: _Cursor, request: SparseRequest, numbers: Int32Array,
    slots: Int32Array, at: int,
) -> tuple[int, _Cursor]:  # fmt: skip
    """Write up to 256 keys of a list to numbers[at:] and their slots to slots[at:].

    Returns:
        How many, and the cursor after them.
    """
    span, key, count = cursor.span, cursor.key, 0
    while span < cursor.end and count < SEGMENT:
        end = lists.spans[2 * span + 1]
        taken = min(SEGMENT - count, end - key)
        for i in range(taken):
            numbers[at + count + i] = np.int32(key + i)
            slots[at + count + i] = request.slots[key + i]
        count += taken
        key += taken
        if key == end:
            span += 1
            if span < cursor.end:
                key = int(lists.spans[2 * span])
    return count, _Cursor(span, cursor.end, key)


@kernel
def _visible_keys(
    numbers: Int32Array, at: int, count: int, position: int, rows: int, ends: Int32Array
) -> None:
    """Write how many of a segment's keys each row sees to ends[:rows].

    Args:
        numbers: the keys are numbers[at:at + count], ascending.
        at, count: see above.
        position: of the first row.
        rows: of the block.
        ends: int32 [64].
    """
    seen = 0
    for row in range(rows):
        while seen < count and numbers[at + seen] <= position + row:
            seen += 1
        ends[row] = np.int32(seen)


@kernel
def _attend_block(
    kv: LayerKV, heads: AttentionHeads, request: SparseRequest, lists: KeyLists, block: int,
    head: int, memory: BlockScratch, numbers: Int32Array, slots: Int32Array, ends: Int32Array,
) -> int:  # fmt: skip
    """Compute a block's attention to its totals; return how many keys are listed."""
    dim, first_row = heads.head_dim, block * BLOCK
    rows = min(BLOCK, request.rows - first_row)
    position = request.position + first_row
    base = kv.first_entry + head // heads.group * kv.slots
    unit = block * heads.query_heads + head
    first, end = int(lists.indptr[unit]), int(lists.indptr[unit + 1])
    key = int(lists.spans[2 * first]) if first < end else 0
    # A literal would be a type of its own, and be compiled for again.
    top: Any = np.int64(0)
    at, listed = top, top
    count, cursor = _next_segment(lists, _Cursor(first, end, key), request, numbers, slots, at)
    while count > 0:
        following = SEGMENT - at
        next_count, cursor = _next_segment(lists, cursor, request, numbers, slots, following)
        _visible_keys(numbers, at, count, position, rows, ends)
        shape = SegmentRows(rows, 1, 0, 0, dim, ends, 0, 0)
        scores = memory.scores
        score_block(
            kv, heads, head // heads.group, memory.queries, shape, slots, at, count, memory, scores
        )
        out = memory.totals if listed == 0 else memory.part
        softmax_segment(kv.cache.values, shape, count, scores, out.states, top)
        values = KVSpan(kv.cache.values, base * dim, slots, at, count)
        if is_quantized(kv.cache.values):
            multiply_scales(kv.cache.value_scales, base, values, memory.scales, rows, scores)
        ahead = KVSpan(kv.cache.keys, base * dim, slots, following, next_count)
        weigh_values(scores, shape, values, ahead, memory.panel, out.sums, top)
        if listed > 0:
            merge_rows(memory.totals, memory.part, top, rows, dim)
        listed += count
        at, count = following, next_count
    return int(listed)


@entry_point
def attend_lists(
    thread: int, threads: int, sync: Int64Array, kv: LayerKV, heads: AttentionHeads,
    queries: Queries, request: SparseRequest, lists: KeyLists, out: Activations,
    scratch: Float32Array, numbers: Int32Array, pairs: Int64Array,
) -> None:  # fmt: skip
    """Run one layer's attention of a request's rows over the keys that are listed.

    Args:
        thread, threads, sync: see ThreadPool.run.
        kv: the layer's KV, the batch's own rows written.
        heads: the layer's attention; it has no window.
        queries: of all rows of the batch.
        request: the rows.
        lists: their keys.
        out: [rows of the batch, query_heads * head_dim].
        scratch: float32 [threads, scratch_size(head_dim)].
        numbers: int32 [threads, 4 * 256 + 64].
        pairs: int64 [blocks * query_heads], rows times listed keys of each unit.
    """
    memory = cut_scratch(scratch[thread], heads.head_dim)
    own = numbers[thread]
    keys, slots, ends = own[: 2 * SEGMENT], own[2 * SEGMENT : 4 * SEGMENT], own[4 * SEGMENT :]
    dim, query_heads = heads.head_dim, heads.query_heads
    units = len(lists.indptr) - 1
    work = take_work(sync, 1)
    while work < units:
        # The last blocks have the most keys; starting with them evens out the end.
        unit = units - 1 - work
        block, head = unit // query_heads, unit % query_heads
        row = request.row + block * BLOCK
        rows = min(BLOCK, request.rows - block * BLOCK)
        load_queries(kv, queries.values, queries.stride, row, rows, head, heads, memory.queries)
        listed = _attend_block(kv, heads, request, lists, block, head, memory, keys, slots, ends)
        pairs[unit] = rows * listed
        for r in range(rows):
            at = ((row + r) * query_heads + head) * dim
            finish_row(memory.totals, r, dim, out.values, at)
            quantize(out, at, dim)
        work = take_work(sync, 1)
    barrier(sync, threads)
