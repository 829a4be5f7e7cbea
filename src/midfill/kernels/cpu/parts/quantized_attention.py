"""Attention over a segment of quantised keys, compiled when a step first needs it.

A piece of the segment's keys is decoded, then scored; its values are decoded in the same memory,
then weighted. Pieces are merged in order.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.jit import entry_point
from midfill.kernels.cpu.kv_cache import LayerKV
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.parts.keys import PartKeys, PartScratch
from midfill.kernels.cpu.parts.quantized import PIECE, cut_quantized, decode_vectors, entries_in
from midfill.kernels.cpu.segment_attention import score_keys, softmax_segment, weigh_values
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows, empty
from midfill.kernels.cpu.softmax import SoftmaxSums, merge_rows


@entry_point
def attend_quantized_segment(
    kv: LayerKV, part: PartKeys, segment: int, rows: int, group: int, dim: int,
    memory: PartScratch, out: SoftmaxSums,
) -> None:  # fmt: skip
    """Compute a block's attention over a segment of quantised keys, to ``out``, piece by piece.

    Called through its address (calls.py).

    Args:
        kv: the layer's.
        part: whose keys.
        segment: which 256 of them; at least one is there.
        rows: of the block, times ``group``.
        group: query heads of the block.
        dim: elements of a key.
        memory: holds the block's queries.
        out: of the block's rows.
    """
    top: Any = np.int64(0)
    base, scores, start = part.head.base * 0, memory.scores, segment * SEGMENT
    scratch, ascending = cut_quantized(memory.quantized, dim), memory.numbers
    for i in range(PIECE):
        ascending[i] = np.int32(i)
    shape = SegmentRows(rows, group, SEGMENT, 0, dim, memory.ends[:0], 0, 0)
    keys = entries_in(scratch.entries, kv.cache.keys)
    values = entries_in(scratch.entries, kv.cache.values)
    end = min(start + SEGMENT, part.quantized)
    for first in range(start, end, PIECE):
        count = min(PIECE, end - first)
        sums = out if first == start else scratch.piece
        decode_vectors(
            kv.cache, part.blocks, part.first_block, part.end_block, 0, first, count, dim,
            scratch, keys,
        )  # fmt: skip
        span = KVSpan(keys, base, ascending, base, count)
        score_keys(memory.queries, shape, span, empty(span), memory.panel, scores)
        softmax_segment(kv.cache.values, shape, count, scores, sums.states, top)
        decode_vectors(
            kv.cache, part.blocks, part.first_block, part.end_block, 1, first, count, dim,
            scratch, values,
        )  # fmt: skip
        span = KVSpan(values, base, ascending, base, count)
        weigh_values(scores, shape, span, empty(span), memory.panel, sums.sums, top)
        if first > start:
            merge_rows(out, scratch.piece, top, rows, dim)
