"""Attention over two groups of keys, of which the first has a temperature and a scale.

A unit of work is a block of up to 64 rows with one query head. The keys of each group are cut into
segments of 256 from the group's first key on, which are merged in order, and so are the groups
(softmax.py). So a row's result doesn't depend on the rows beside it.
"""

from typing import Any, NamedTuple

import numpy as np

from midfill.kernels.cpu.activations import Activations, quantize
from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.kv_cache import LayerKV, is_quantized
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.segment_attention import softmax_segment, weigh_values
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.segments import multiply_scales
from midfill.kernels.cpu.softmax import SoftmaxSums, finish_row, merge_rows
from midfill.kernels.cpu.sparse.requests import (
    BLOCK,
    BlockScratch,
    cut_scratch,
    load_queries,
    score_block,
)
from midfill.kernels.cpu.sparse.requests import scratch_size as block_scratch_size
from midfill.kernels.cpu.thread_pool import barrier, take_work


class GroupedRequest(NamedTuple):
    """Rows of one request in a batch, and its keys.

    Attributes:
        row: the first one's number in the batch.
        rows: how many there are.
        group: how many keys are in the first group; all rows see these.
        slots: int32 [keys], of the first group, then of the other one, which ends with those of
            the rows; each row sees the ones up to its own.
    """

    row: int
    rows: int
    group: int
    slots: Int32Array


def scratch_size(head_dim: int) -> int:
    """Return how many float32 a thread needs."""
    return block_scratch_size(head_dim) + BLOCK * head_dim + 2 * BLOCK


@kernel
def _attend_range(
    kv: LayerKV, heads: AttentionHeads, request: GroupedRequest, head: int, rows: int, first: int,
    end: int, seen: int, memory: BlockScratch, totals: SoftmaxSums,
) -> None:  # fmt: skip
    """Compute a block's attention over the keys first <= i < end to ``totals``.

    Args:
        kv, heads: the layer's.
        request: whose keys.
        head: the query head.
        rows: of the block.
        first, end: the keys.
        seen: how many of the request's keys the block's first row sees, each later one one more.
        memory: holds the block's scaled queries.
        totals: of the block's rows.
    """
    dim = heads.head_dim
    base = kv.first_entry + head // heads.group * kv.slots
    top: Any = np.int64(0)  # a literal would be a type of its own, and be compiled for again
    for start in range(first, end, SEGMENT):
        count = min(SEGMENT, end - start)
        limit = seen - start
        shape = SegmentRows(rows, 1, limit, 0, dim, request.slots[:0], 0, 0)
        scores = memory.scores
        score_block(
            kv, heads, head // heads.group, memory.queries, shape, request.slots, start, count,
            memory, scores,
        )  # fmt: skip
        out = totals if start == first else memory.part
        softmax_segment(kv.cache.values, shape, count, scores, out.states, top)
        values = KVSpan(kv.cache.values, base * dim, request.slots, start, count)
        if is_quantized(kv.cache.values):
            multiply_scales(kv.cache.value_scales, base, values, memory.scales, rows, scores)
        following = min(SEGMENT, max(end - start - SEGMENT, 0))
        ahead = KVSpan(kv.cache.keys, base * dim, request.slots, start + count, following)
        weigh_values(scores, shape, values, ahead, memory.panel, out.sums, top)
        if start > first:
            merge_rows(totals, memory.part, top, rows, dim)


@kernel
def _scale_masses(totals: SoftmaxSums, rows: int, power: float) -> None:
    """Raise the mass of a group's keys, the sum of exp(score), to a power, for each row."""
    for row in range(rows):
        rest = np.log(np.float64(totals.states[2 * row + 1]))
        mass = np.float64(totals.states[2 * row]) + rest
        totals.states[2 * row] = np.float32(power * mass - rest)


@entry_point
def attend_groups(
    thread: int, threads: int, sync: Any, kv: LayerKV, heads: AttentionHeads,
    group_heads: AttentionHeads, power: float, queries: Queries, request: GroupedRequest,
    out: Activations, scratch: Float32Array,
) -> None:  # fmt: skip
    """Run one layer's attention of a request's rows.

    Args:
        thread, threads, sync: see ThreadPool.run.
        kv: the layer's KV, the batch's own rows written.
        heads: the layer's attention; it has no window.
        group_heads: the same for the first group, whose scores have another factor.
        power: of the first group's mass.
        queries: of all rows of the batch.
        request: the rows.
        out: [rows of the batch, query_heads * head_dim].
        scratch: float32 [threads, scratch_size(head_dim)].
    """
    own, dim = scratch[thread], heads.head_dim
    memory = cut_scratch(own, dim)
    rest = own[len(own) - BLOCK * dim - 2 * BLOCK :]
    group = SoftmaxSums(rest[: 2 * BLOCK], rest[2 * BLOCK :])
    top: Any = np.int64(0)
    blocks, keys = (request.rows + BLOCK - 1) // BLOCK, len(request.slots)
    work = take_work(sync, 1)
    while work < blocks * heads.query_heads:
        # The last blocks have the most keys; starting with them evens out the end.
        block, head = blocks - 1 - work // heads.query_heads, work % heads.query_heads
        first = block * BLOCK
        row, rows = request.row + first, min(BLOCK, request.rows - first)
        seen = keys - request.rows + first + 1
        load_queries(
            kv, queries.values, queries.stride, row, rows, head, group_heads, memory.queries
        )
        _attend_range(
            kv, heads, request, head, rows, top, request.group, request.group, memory, group
        )
        _scale_masses(group, rows, power)
        load_queries(kv, queries.values, queries.stride, row, rows, head, heads, memory.queries)
        _attend_range(
            kv, heads, request, head, rows, request.group, seen + rows - 1, seen, memory,
            memory.totals,
        )  # fmt: skip
        merge_rows(group, memory.totals, top, rows, dim)
        for r in range(rows):
            at = ((row + r) * heads.query_heads + head) * dim
            finish_row(group, r, dim, out.values, at)
            quantize(out, at, dim)
        work = take_work(sync, 1)
    barrier(sync, threads)
