"""What the kernels of sparse prefill take: one request's rows, and where its keys lie."""

from typing import NamedTuple

import numpy as np

from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_cache import LayerKV, is_quantized
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.pair_segments import panel_words
from midfill.kernels.cpu.segment_attention import prepare_queries, score_keys
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.segments import multiply_scales
from midfill.kernels.cpu.simd import LANES, load, multiply, splat, store
from midfill.kernels.cpu.softmax import SoftmaxSums

BLOCK = 64
"""Rows of a query block; ``runners.forward.sparse.QUERY_BLOCK``."""


class SparseRequest(NamedTuple):
    """Rows of one request in a batch.

    Attributes:
        row: the first one's number in the batch.
        rows: how many there are.
        position: of the first one; as many keys come before it.
        slots: int32 [at least position + rows], of the request's keys.
    """

    row: int
    rows: int
    position: int
    slots: Int32Array


class BlockScratch(NamedTuple):
    """A thread's memory for one query block and head.

    Attributes:
        queries: float32 [64 * head_dim], scaled, see ``prepare_queries``.
        scores: float32 [64 * 256].
        panel: float32 [panel_words(head_dim)], transposed keys or interleaved values.
        scales: float32 [16].
        totals: the segments merged so far, 64 rows.
        part: one segment, 64 rows.
    """

    queries: Float32Array
    scores: Float32Array
    panel: Float32Array
    scales: Float32Array
    totals: SoftmaxSums
    part: SoftmaxSums


def scratch_size(head_dim: int) -> int:
    """Return how many float32 a thread needs."""
    return 3 * BLOCK * head_dim + BLOCK * SEGMENT + LANES + 4 * BLOCK + panel_words(head_dim)


@kernel
def cut_scratch(scratch: Float32Array, head_dim: int) -> BlockScratch:
    """Cut a thread's memory into its parts."""
    size = BLOCK * head_dim
    queries, rest = scratch[:size], scratch[size:]
    total_sums, rest = rest[:size], rest[size:]
    part_sums, rest = rest[:size], rest[size:]
    scores, rest = rest[: BLOCK * SEGMENT], rest[BLOCK * SEGMENT :]
    scales, rest = rest[:LANES], rest[LANES:]
    totals = SoftmaxSums(rest[: 2 * BLOCK], total_sums)
    part = SoftmaxSums(rest[2 * BLOCK : 4 * BLOCK], part_sums)
    panel = rest[4 * BLOCK :]
    return BlockScratch(queries, scores, panel, scales, totals, part)


@kernel
def load_queries(
    kv: LayerKV, queries: Float32Array, stride: int, row: int, rows: int, head: int,
    heads: AttentionHeads, scaled: Float32Array,
) -> None:  # fmt: skip
    """Copy one head's queries of some rows of the batch to ``scaled``, scaled and prepared."""
    dim = heads.head_dim
    factor = splat(np.float32(heads.scale))
    for r in range(rows):
        at = (row + r) * stride + head * dim
        for d in range(0, dim, LANES):
            store(scaled, r * dim + d, multiply(load(queries, at + d), factor))
    prepare_queries(kv.cache.keys, scaled, rows * dim)


@kernel
def score_block(
    kv: LayerKV, heads: AttentionHeads, kv_head: int, queries: Float32Array, rows: SegmentRows,
    slots: Int32Array, first: int, count: int, memory: BlockScratch, scores: Float32Array,
) -> None:  # fmt: skip
    """Compute scores[rows, 256] of a block's rows with the keys slots[first:first + count]."""
    base = kv.first_entry + kv_head * kv.slots
    keys = KVSpan(kv.cache.keys, base * heads.head_dim, slots, first, count)
    values = KVSpan(kv.cache.values, base * heads.head_dim, slots, first, count)
    score_keys(queries, rows, keys, values, memory.panel, scores)
    if is_quantized(kv.cache.keys):
        multiply_scales(kv.cache.key_scales, base, keys, memory.scales, rows.total, scores)
