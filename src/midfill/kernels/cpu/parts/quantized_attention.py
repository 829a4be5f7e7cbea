"""Attention over a segment of quantised keys, compiled when a step first needs it.

A segment is cut into pieces where blocks end. Where codes can be multiplied as they are, they are
(quantized_products.py). Otherwise keys are decoded, a few at a time, then scored; their values are
decoded in the same memory, then weighted. Pieces are merged in order. A KV cache of float32 is for
who wants nothing rounded that needn't be: there, all is decoded.
"""

from typing import Any

import numpy as np
from numba import types

from midfill.kernels.cpu.jit import entry_point, inlined_kernel, kernel, kernel_by_type
from midfill.kernels.cpu.kv_cache import KVArray, LayerKV
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Int32Array
from midfill.kernels.cpu.parts.block_bytes import BlockBytes, are_consecutive, prefetch_bytes
from midfill.kernels.cpu.parts.keys import PartKeys, PartScratch
from midfill.kernels.cpu.parts.quantized import (
    PIECE,
    QuantizedScratch,
    cut_quantized,
    decode_stream,
    entries_in,
    find_nibbles,
    load_nibbles,
    prefetch_codes,
)
from midfill.kernels.cpu.parts.quantized_products import (
    correct_scores,
    correct_sums,
    groups_of,
    has_corrections,
    has_plain_codes,
    number_groups,
    score_codes,
    weigh_codes,
)
from midfill.kernels.cpu.segment_attention import score_keys, softmax_segment, weigh_values
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows, empty
from midfill.kernels.cpu.softmax import SoftmaxSums, merge_rows
from midfill.kv.quantized_layout import (
    BLOCK_FIELDS,
    CELLS,
    CELLS_AT,
    STREAM_FIELDS,
    STREAMS,
    TOKENS,
)


@inlined_kernel
def _block_bytes(kv: LayerKV, part: PartKeys, block: Int32Array, dim: int) -> BlockBytes:
    """Return where the bytes of a block are, given its row of the table."""
    cells = part.blocks.cells[block[CELLS_AT] :]
    filled = int(block[CELLS])
    is_run = are_consecutive(cells, filled)
    return BlockBytes(kv.cache, cells, filled, dim * kv.cache.keys.itemsize, is_run)


@inlined_kernel
def _codes_ahead(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int, like: KVSpan,
    groups: int, dim: int,
) -> KVSpan:  # fmt: skip
    """Return a stream's codes as what a kernel can prefetch; prefetch them here if it can't.

    Args:
        source, fields, tokens, first, count, dim: see ``load_codes``; none if first >= tokens.
        like: a span of entries one after the other.
        groups: that its slots count.
    """
    if first >= tokens:
        return empty(like)
    if count > tokens - first:
        count = tokens - first
    is_found, codes = find_nibbles(source, fields, tokens, first, count, dim)
    if is_found and groups_of(fields) == groups:
        return KVSpan(codes.entries, codes.base, like.slots, like.first, count)
    prefetch_codes(source, fields, tokens, first, count, dim)
    return empty(like)


@inlined_kernel
def _multiply_codes(
    kv: LayerKV, source: BlockBytes, block: Int32Array, first: int, count: int, stride: int,
    shape: SegmentRows, memory: PartScratch, scratch: QuantizedScratch, out: SoftmaxSums,
) -> None:  # fmt: skip
    """Compute attention over ``count`` keys of a block, from ``first`` on, to ``out``.

    Args:
        kv: the layer's.
        source, block: the block's bytes, and its row of the table.
        first, count: see above; at most 256.
        stride: how many keys further on this thread is likely to go on.
        shape: of the rows, which see all keys.
        memory: holds the rows' queries.
        scratch: for the codes.
        out: of the rows.
    """
    top: Any = np.int64(0)
    dim, scores, tokens = shape.head_dim, memory.scores, int(block[TOKENS])
    keys, values = block[STREAMS:], block[STREAMS + STREAM_FIELDS :]
    codes = load_nibbles(source, keys, tokens, first, count, dim, scratch)
    groups = groups_of(keys)
    number_groups(memory.numbers, count, groups)
    span = KVSpan(codes.entries, codes.base, memory.numbers, top, count)
    ahead = _codes_ahead(source, values, tokens, first, count, span, groups, dim)
    score_codes(
        kv.cache.keys, memory.queries, keys, shape, span, ahead, memory.panel, scratch, scores
    )  # fmt: skip
    if has_corrections(keys):
        correct_scores(
            kv.cache.keys, source, keys, tokens, first, count, memory.queries, shape, scratch,
            scores,
        )  # fmt: skip
    softmax_segment(codes.entries, shape, count, scores, out.states, top)
    codes = load_nibbles(source, values, tokens, first, count, dim, scratch)
    groups = groups_of(values)
    number_groups(memory.numbers, count, groups)
    span = KVSpan(codes.entries, codes.base, memory.numbers, top, count)
    ahead = _codes_ahead(source, keys, tokens, first + stride, count, span, groups, dim)
    weigh_codes(scores, values, shape, span, ahead, memory.panel, scratch, out.sums)
    if has_corrections(values):
        correct_sums(source, values, tokens, first, count, scores, shape, scratch, out.sums)


@kernel
def _multiply_decoded(
    kv: LayerKV, source: BlockBytes, block: Int32Array, first: int, count: int, shape: SegmentRows,
    memory: PartScratch, scratch: QuantizedScratch, out: SoftmaxSums,
) -> None:  # fmt: skip
    """Compute the same of keys that are decoded, at most PIECE; arguments as of
    ``_multiply_codes``."""
    top: Any = np.int64(0)
    dim, scores, tokens = shape.head_dim, memory.scores, int(block[TOKENS])
    keys = entries_in(scratch.entries, kv.cache.keys)
    values = entries_in(scratch.entries, kv.cache.values)
    decode_stream(source, block[STREAMS:], tokens, first, count, dim, scratch, keys)
    prefetch_codes(source, block[STREAMS + STREAM_FIELDS :], tokens, first, count, dim)
    span = KVSpan(keys, top, memory.numbers, top, count)
    score_keys(memory.queries, shape, span, empty(span), memory.panel, scores)
    softmax_segment(kv.cache.values, shape, count, scores, out.states, top)
    decode_stream(
        source, block[STREAMS + STREAM_FIELDS :], tokens, first, count, dim, scratch, values
    )  # fmt: skip
    span = KVSpan(values, top, memory.numbers, top, count)
    weigh_values(scores, shape, span, empty(span), memory.panel, out.sums, top)


@kernel
def _attend_decoded(
    entries: KVArray, kv: LayerKV, source: BlockBytes, block: Int32Array, first: int, end: int,
    is_first: bool, stride: int, shape: SegmentRows, memory: PartScratch,
    scratch: QuantizedScratch, out: SoftmaxSums,
) -> None:  # fmt: skip
    """Add attention over the keys first <= i < end of a block to ``out``; decode them all.

    Args:
        entries: of the cache, which kernels are chosen by.
        is_first: whether nothing is in ``out`` yet.
        kv, source, block, first, end, stride, shape, memory, scratch, out: see
            ``_multiply_codes``.
    """
    top: Any = np.int64(0)
    key, alone = first, is_first
    number_groups(memory.numbers, PIECE, 1)
    while key < end:
        count, sums = end - key, out if alone else scratch.piece
        if count > PIECE:
            count = PIECE
        _multiply_decoded(kv, source, block, key, count, shape, memory, scratch, sums)
        if not alone:
            merge_rows(out, scratch.piece, top, shape.total, shape.head_dim)
        key, alone = key + count, False


@inlined_kernel
def _attend_codes(
    entries: KVArray, kv: LayerKV, source: BlockBytes, block: Int32Array, first: int, end: int,
    is_first: bool, stride: int, shape: SegmentRows, memory: PartScratch,
    scratch: QuantizedScratch, out: SoftmaxSums,
) -> None:  # fmt: skip
    """Do the same, and decode only what can't be multiplied as it is."""
    top: Any = np.int64(0)
    dim = shape.head_dim
    keys, values = block[STREAMS:], block[STREAMS + STREAM_FIELDS :]
    if not (has_plain_codes(keys, dim) and has_plain_codes(values, dim)):
        _attend_decoded(
            entries, kv, source, block, first, end, is_first, stride, shape, memory, scratch,
            out,
        )  # fmt: skip
        return
    sums = out if is_first else scratch.piece
    _multiply_codes(kv, source, block, first, end - first, stride, shape, memory, scratch, sums)
    if not is_first:
        merge_rows(out, scratch.piece, top, shape.total, dim)


@kernel_by_type
def _attend_block(entries: Any, *_: Any) -> Any:
    """Add attention over keys of a block to ``out``; arguments as of ``_attend_decoded``."""
    return _attend_decoded if entries.dtype == types.float32 else _attend_codes


@kernel
def _prefetch_following(
    kv: LayerKV, part: PartKeys, number: int, key: int, target: int, dim: int
) -> None:
    """Prefetch the block that holds key ``target``, if it is small: larger ones' codes are
    prefetched as they are read.

    Args:
        kv, part, dim: see ``attend_quantized_segment``.
        number: of a block.
        key: its first one, at most ``target``.
        target: see above.
    """
    if target >= part.quantized:
        return
    tokens = int(part.blocks.table[number * BLOCK_FIELDS + TOKENS])
    while key + tokens <= target:
        key, number = key + tokens, number + 1
        tokens = int(part.blocks.table[number * BLOCK_FIELDS + TOKENS])
    if tokens <= SEGMENT:
        source = _block_bytes(kv, part, part.blocks.table[number * BLOCK_FIELDS :], dim)
        prefetch_bytes(source, 0, 2 * source.filled * source.half_bytes)


@entry_point
def attend_quantized_segment(
    kv: LayerKV, part: PartKeys, segment: int, stride: int, rows: int, group: int, dim: int,
    memory: PartScratch, out: SoftmaxSums,
) -> None:  # fmt: skip
    """Compute a block's attention over a segment of quantised keys, to ``out``, piece by piece.

    Called through its address (calls.py).

    Args:
        kv: the layer's.
        part: whose keys.
        segment: which 256 of them; at least one is there.
        stride: how many segments further on this thread is likely to go on.
        rows: of the block, times ``group``.
        group: query heads of the block.
        dim: elements of a key.
        memory: holds the block's queries.
        out: of the block's rows.
    """
    scratch = cut_quantized(memory.quantized, dim)
    shape = SegmentRows(rows, group, SEGMENT, 0, dim, memory.ends[:0], 0, 0)
    start, before = segment * SEGMENT, 0
    end = min(start + SEGMENT, part.quantized)
    number = part.first_block
    tokens = int(part.blocks.table[number * BLOCK_FIELDS + TOKENS])
    while before + tokens <= start:  # blocks before the segment
        before, number = before + tokens, number + 1
        tokens = int(part.blocks.table[number * BLOCK_FIELDS + TOKENS])
    while before < end:
        block = part.blocks.table[number * BLOCK_FIELDS :]
        source, tokens = _block_bytes(kv, part, block, dim), int(block[TOKENS])
        key, last = max(start, before), min(end, before + tokens)
        following = last if last < end else start + stride * SEGMENT
        _prefetch_following(kv, part, number, before, following, dim)
        _attend_block(
            kv.cache.keys, kv, source, block, key - before, last - before, key == start,
            stride * SEGMENT, shape, memory, scratch, out,
        )  # fmt: skip
        before, number = before + tokens, number + 1
