"""A part's keys in one KV head: gathered segment by segment, listed or all, with their terms.

Quantised keys come first (quantized.py). The others are numbered in order, cells first, then slots.
Where some are cells, or only listed ones are read, the numbers of a segment's keys are gathered,
and their cells; otherwise the slots are read where the batch lists them.
"""

from typing import NamedTuple

import numpy as np

from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.attention_parts import (
    PART_FIELDS,
    SLOTS_AT,
    AttentionParts,
    QuantizedTable,
)
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.kv_cache import KVArray, LayerKV, is_quantized
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.pair_segments import panel_words
from midfill.kernels.cpu.parts.quantized import BLOCK_ROWS, quantized_scratch_size, quantized_words
from midfill.kernels.cpu.ragged_cells import (
    SCORE_BIAS,
    SCORE_FACTOR,
    VALUE_FACTOR,
    HeadKeys,
    RaggedCells,
    find_keys,
)
from midfill.kernels.cpu.segment_attention import prepare_queries, scale_column, score_keys
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.segments import multiply_scales
from midfill.kernels.cpu.simd import LANES, fma, load, multiply, splat, store
from midfill.kernels.cpu.softmax import SoftmaxSums
from midfill.kv.quantized_layout import BLOCK_FIELDS, TOKENS

BLOCK = BLOCK_ROWS
"""Rows of a query block, times the query heads that share a unit; ``QUERY_BLOCK`` of lists."""
NUMBERS = 4 * SEGMENT + BLOCK
"""Length of a thread's int32 scratch: numbers and cells of two segments of keys, and how many keys
each row sees."""


class PartRows(NamedTuple):
    """Rows of a request, and the part of its keys that they look at.

    Attributes:
        part: the part's number.
        row: the first row's number in the batch.
        rows: how many there are.
        visible_at: where ``AttentionParts.visible`` says how many of the part's slots they see.
    """

    part: int
    row: int
    rows: int
    visible_at: int


class PartScratch(NamedTuple):
    """A thread's memory for one query block.

    Attributes:
        queries: float32 [64 * head_dim], scaled, see ``prepare_queries``.
        scores: float32 [64 * 256].
        panel: float32 [panel_words(head_dim)], transposed keys or interleaved values.
        gathered: float32 [32], scales or terms of 16 keys.
        totals, part, segment: all parts so far, one part, one segment; 64 rows each.
        numbers, cells: int32 [2 * 256], of a segment's keys and of the next one's.
        ends: int32 [64], how many of a segment's keys each row sees.
        quantized: float32 [quantized_words(head_dim)], see ``cut_quantized``.
    """

    queries: Float32Array
    scores: Float32Array
    panel: Float32Array
    gathered: Float32Array
    totals: SoftmaxSums
    part: SoftmaxSums
    segment: SoftmaxSums
    numbers: Int32Array
    cells: Int32Array
    ends: Int32Array
    quantized: Float32Array


def scratch_size(head_dim: int) -> int:
    """Return how many float32 a thread needs."""
    rows = 4 * BLOCK * head_dim + 3 * 2 * BLOCK
    own = rows + BLOCK * SEGMENT + 2 * LANES + panel_words(head_dim)
    return own + quantized_scratch_size(head_dim)


@kernel
def cut_scratch(scratch: Float32Array, numbers: Int32Array, head_dim: int) -> PartScratch:
    """Cut a thread's memory into its parts."""
    size, states = BLOCK * head_dim, 2 * BLOCK
    queries, rest = scratch[:size], scratch[size:]
    total_sums, rest = rest[:size], rest[size:]
    part_sums, rest = rest[:size], rest[size:]
    segment_sums, rest = rest[:size], rest[size:]
    scores, rest = rest[: BLOCK * SEGMENT], rest[BLOCK * SEGMENT :]
    gathered, rest = rest[: 2 * LANES], rest[2 * LANES :]
    totals = SoftmaxSums(rest[:states], total_sums)
    part = SoftmaxSums(rest[states : 2 * states], part_sums)
    segment = SoftmaxSums(rest[2 * states : 3 * states], segment_sums)
    rest, words = rest[3 * states :], quantized_words(head_dim)
    return PartScratch(
        queries, scores, rest[words:], gathered, totals, part, segment,
        numbers[: 2 * SEGMENT], numbers[2 * SEGMENT : 4 * SEGMENT], numbers[4 * SEGMENT :],
        rest[:words],
    )  # fmt: skip


class PartKeys(NamedTuple):
    """Where the keys of a part lie in one layer and KV head.

    Attributes:
        head: cells and slots.
        slots: int32, of all parts.
        ragged: the cells of all parts.
        blocks: the quantised blocks of all parts.
        first_block, end_block: those of this part and head.
        quantized: how many keys they hold.
    """

    head: HeadKeys
    slots: Int32Array
    ragged: RaggedCells
    blocks: QuantizedTable
    first_block: int
    end_block: int
    quantized: int


class KeyList(NamedTuple):
    """Which of a part's keys are read: spans first <= i < end of ``spans``, or all keys.

    Attributes:
        listed: whether there is a list.
        spans: int32 [n * 2], first key and the one after the last, ascending and apart.
        first, end: the list's.
    """

    listed: bool
    spans: Int32Array
    first: int
    end: int


class Cursor(NamedTuple):
    """How far the keys of a list have been gathered: the span that is being read, the next key."""

    span: int
    key: int


@inlined_kernel
def part_keys(parts: AttentionParts, part: int, kv: LayerKV, kv_head: int) -> PartKeys:
    """Return where a part's keys lie in one head of a layer."""
    slots_at = int(parts.parts[part * PART_FIELDS + SLOTS_AT])
    head = find_keys(parts.ragged, part, kv, kv_head, slots_at)
    blocks, first, end, quantized = parts.quantized, 0, 0, 0
    if len(blocks.first) > 0 and blocks.first[part] >= 0:
        place = blocks.first[part] + head.base // kv.slots
        first, end = int(blocks.indptr[place]), int(blocks.indptr[place + 1])
        for block in range(first, end):
            quantized += int(blocks.table[block * BLOCK_FIELDS + TOKENS])
    return PartKeys(head, parts.kv_slots, parts.ragged, blocks, first, end, quantized)


@inlined_kernel
def list_of(parts: AttentionParts, number: int) -> KeyList:
    """Return a list of the batch; all keys where its number is -1."""
    listed = number >= 0
    first, end = 0, 0
    if listed:
        first, end = int(parts.indptr[number]), int(parts.indptr[number + 1])
    return KeyList(listed, parts.spans, first, end)


@inlined_kernel
def start_list(keys: KeyList) -> Cursor:
    """Return the cursor before the first key."""
    key = 0
    if keys.listed and keys.first < keys.end:
        key = int(keys.spans[2 * keys.first])
    return Cursor(keys.first, key)


@kernel
def gather_keys(
    part: PartKeys, keys: KeyList, cursor: Cursor, seen: int, numbers: Int32Array,
    cells: Int32Array, at: int,
) -> tuple[int, Cursor]:  # fmt: skip
    """Write up to 256 keys of a list to numbers[at:] and their cells to cells[at:].

    Args:
        part: whose keys.
        keys: which of them.
        cursor: where to begin.
        seen: how many of the part's keys any row sees; no key from there on is written.
        numbers, cells: int32 [2 * 256].
        at: see above.

    Returns:
        How many, and the cursor after them.
    """
    head, span, key, count = part.head, cursor.span, cursor.key, 0
    while count < SEGMENT and (span < keys.end or not keys.listed):
        end = seen
        if keys.listed:
            end = min(end, int(keys.spans[2 * span + 1]))
        taken = max(min(SEGMENT - count, end - key), 0)
        for i in range(taken):
            number = key + i
            numbers[at + count + i] = np.int32(number)
            if number < head.cells:
                cells[at + count + i] = part.ragged.cells[head.cells_at + number]
            else:
                slot = part.slots[head.slots_at + number - head.cells]
                cells[at + count + i] = np.int32(head.base + slot)
        count += taken
        key += taken
        if key < end:
            break  # the segment is full
        if not keys.listed:
            break
        span += 1
        if span < keys.end:
            key = int(keys.spans[2 * span])
    return count, Cursor(span, key)


@kernel
def count_seen(
    numbers: Int32Array, at: int, count: int, visible: Int32Array, visible_at: int, cells: int,
    rows: int, ends: Int32Array,
) -> None:  # fmt: skip
    """Write how many of a segment's keys each row sees to ends[:rows].

    Args:
        numbers: the keys are numbers[at:at + count], ascending.
        at, count: see above.
        visible: row r sees visible[visible_at + r] of the part's slots, ascending.
        visible_at: see above.
        cells: how many of the part's keys are cells, which all rows see.
        rows: of the block.
        ends: int32 [64].
    """
    seen = 0
    for row in range(rows):
        limit = cells + visible[visible_at + row]
        while seen < count and numbers[at + seen] < limit:
            seen += 1
        ends[row] = np.int32(seen)


@kernel
def load_queries(
    kv: LayerKV, queries: Queries, row: int, rows: int, first_head: int, group: int,
    heads: AttentionHeads, factor: float, scaled: Float32Array,
) -> None:  # fmt: skip
    """Copy ``group`` heads' queries of some rows of the batch to ``scaled``, prepared for scores.

    Args:
        kv: the layer's.
        queries: of all rows of the batch.
        row, rows: the rows.
        first_head: the first query head.
        group: how many; row r of ``scaled`` is of query row r // group.
        heads: the layer's.
        factor: of q.k.
        scaled: float32 [64 * head_dim].
    """
    dim = heads.head_dim
    scale = splat(np.float32(factor))
    for r in range(rows * group):
        at = (row + r // group) * queries.stride + (first_head + r % group) * dim
        for d in range(0, dim, LANES):
            store(scaled, r * dim + d, multiply(load(queries.values, at + d), scale))
    prepare_queries(kv.cache.keys, scaled, rows * group, dim)


@kernel
def score_span(
    kv: LayerKV, scale_at: int, rows: SegmentRows, keys: KVSpan, memory: PartScratch,
    scores: Float32Array,
) -> None:  # fmt: skip
    """Compute scores[rows, 256] of a block's rows with a span of keys.

    Args:
        kv: the layer's.
        scale_at: number of the entry that the span's numbers count from.
        rows: of the block.
        keys: in ``kv.cache.keys``.
        memory: holds the queries.
        scores: float32 [rows * 256].
    """
    values = KVSpan(kv.cache.values, keys.base, keys.slots, keys.first, keys.length)
    score_keys(memory.queries, rows, keys, values, memory.panel, scores)
    if is_quantized(kv.cache.keys):
        multiply_scales(kv.cache.key_scales, scale_at, keys, rows.total, scores)


@kernel
def _gather_term(
    part: PartKeys, term: int, neutral: float, numbers: Int32Array, at: int, end: int,
    gathered: Float32Array, to: int,
) -> None:  # fmt: skip
    """Write a term of 16 keys to gathered[to:to + 16]; keys that are slots have the neutral one."""
    terms_at = term * len(part.ragged.cells) + part.head.cells_at
    for i in range(LANES):
        value = np.float32(neutral)
        if at + i < end and numbers[at + i] < part.head.cells:
            value = part.ragged.terms[terms_at + numbers[at + i]]
        gathered[to + i] = value


@kernel
def change_scores(
    part: PartKeys, numbers: Int32Array, at: int, count: int, gathered: Float32Array, rows: int,
    scores: Float32Array,
) -> None:  # fmt: skip
    """scores[rows, 256] = scores * factor + bias, for the keys numbers[at:at + count]."""
    for column in range(0, count, LANES):
        first, end = at + column, at + count
        _gather_term(part, SCORE_FACTOR, 1.0, numbers, first, end, gathered, 0)
        _gather_term(part, SCORE_BIAS, 0.0, numbers, first, end, gathered, LANES)
        factor, bias = load(gathered, 0), load(gathered, LANES)
        for row in range(rows):
            place = row * SEGMENT + column
            store(scores, place, fma(load(scores, place), factor, bias))


@kernel
def scale_weights(
    entries: KVArray, part: PartKeys, numbers: Int32Array, at: int, count: int,
    gathered: Float32Array, rows: int, weights: Float32Array,
) -> None:  # fmt: skip
    """weights[rows, 256] *= value factor, for the keys numbers[at:at + count]."""
    for column in range(0, count, LANES):
        _gather_term(part, VALUE_FACTOR, 1.0, numbers, at + column, at + count, gathered, 0)
        scale_column(entries, weights, column, rows, load(gathered, 0))
