"""Attention of a request's rows over several parts, or over the keys that are listed.

A unit of work is a block of up to 64 rows: of one KV head with the query heads that share it, or,
where keys are listed, of one query head; or one row of one query head, where a selector chooses the
keys before (page_selector.py). The keys that a part's rows attend to are cut into
segments of 256, in order, which are merged in order (softmax.py). Then the part's mass is raised to
its power, and the parts are merged in order. So a row's result doesn't depend on the rows beside
it, and a single part, or a list of all keys, gives the bits of dense attention. What is not listed
is neither read nor multiplied.

Quantised keys come first, in segments of their own (quantized_attention.py). Where few rows meet
them, as when an answer is written, threads share the segments: each is a *partial*, computed on its
own and merged in order afterwards, with the same result.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.activations import Activations, quantize
from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.attention_parts import (
    END_PART,
    FIRST_PART,
    FIRST_PARTIAL,
    FIRST_ROW,
    FIRST_UNIT,
    LISTS,
    PART_FIELDS,
    REQUEST_FIELDS,
    ROWS,
    SEGMENTS,
    VISIBLE_AT,
    AttentionParts,
)
from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.kv_cache import LayerKV, is_quantized, transform_for
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Int64Array
from midfill.kernels.cpu.parts.keys import (
    BLOCK,
    KeyList,
    PartKeys,
    PartScratch,
    change_scores,
    count_seen,
    cut_scratch,
    gather_keys,
    list_of,
    load_queries,
    part_keys,
    scale_weights,
    score_span,
    start_list,
)
from midfill.kernels.cpu.segment_attention import softmax_segment, weigh_values
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.segments import multiply_scales
from midfill.kernels.cpu.simd import LANES, load, store
from midfill.kernels.cpu.sinks import add_sink
from midfill.kernels.cpu.softmax import SoftmaxSums, clear_states, finish_row, merge_rows
from midfill.kernels.cpu.thread_pool import barrier, take_work

MAX_PARTIAL_ROWS = 32
"""Rows, times query heads of a KV head, of requests whose quantised segments are partials."""


@kernel
def _attend_segment(
    kv: LayerKV, part: PartKeys, shape: SegmentRows, keys: KVSpan, numbers_at: int,
    scale_at: int, ahead: KVSpan, memory: PartScratch, out: SoftmaxSums,
) -> None:  # fmt: skip
    """Compute a block's attention over one segment, to ``out``.

    Args:
        kv: the layer's.
        part: whose keys.
        shape: of the block, and which of the segment's keys each row sees.
        keys: the segment's.
        numbers_at: where their numbers start in ``memory.numbers``.
        scale_at: number of the entry that the span's numbers count from.
        ahead: keys to prefetch meanwhile.
        memory: holds the block's queries.
        out: of the block's rows.
    """
    top: Any = np.int64(0)  # a literal would be a type of its own, and be compiled for again
    rows, count, scores, gathered = shape.total, keys.length, memory.scores, memory.gathered
    score_span(kv, scale_at, shape, keys, memory, scores)
    if part.head.has_terms:
        change_scores(part, memory.numbers, numbers_at, count, gathered, rows, scores)
    softmax_segment(kv.cache.values, shape, count, scores, out.states, top)
    if part.head.has_terms:
        scale_weights(
            kv.cache.values, part, memory.numbers, numbers_at, count, gathered, rows, scores
        )
    values = KVSpan(kv.cache.values, keys.base, keys.slots, keys.first, count)
    if is_quantized(kv.cache.values):
        multiply_scales(kv.cache.value_scales, scale_at, values, rows, scores)
    weigh_values(scores, shape, values, ahead, memory.panel, out.sums, top)


@kernel
def _attend_quantized(
    kv: LayerKV, parts: AttentionParts, part: PartKeys, partial: int, head: int,
    heads: AttentionHeads, rows: int, group: int, memory: PartScratch, totals: SoftmaxSums,
) -> None:  # fmt: skip
    """Compute a block's attention over a part's quantised keys to ``totals``.

    Args:
        kv: the layer's.
        parts: of the batch.
        part: whose keys.
        partial: number of the request's first partial; -1 where they are computed here.
        head: the KV head.
        heads: the layer's.
        rows: of the block, times ``group``.
        group, memory, totals: of the block.
    """
    top: Any = np.int64(0)
    dim, partials = heads.head_dim, SoftmaxSums(parts.partial_states, parts.partial_sums)
    for segment in range(top, (part.quantized + SEGMENT - 1) // SEGMENT):
        if partial >= 0:
            first_row = ((partial + segment) * heads.kv_heads + head) * MAX_PARTIAL_ROWS
            merge_rows(totals, partials, first_row, rows, dim)
            continue
        out = totals if segment == 0 else memory.segment
        call_kernel(
            parts.quantized.kernel,
            (kv, part, np.int64(segment), np.int64(1), rows, group, dim, memory, out),
        )
        if segment > 0:
            merge_rows(totals, memory.segment, top, rows, dim)


@kernel
def _attend_partial(
    kv: LayerKV, heads: AttentionHeads, parts: AttentionParts, queries: Queries, work: int,
    partials: int, threads: int, memory: PartScratch,
) -> None:  # fmt: skip
    """Compute a partial: a request's rows with a segment of its quantised keys in one KV head."""
    # Of one head after another, so that a thread's next segment can be prefetched.
    segments = partials // heads.kv_heads
    head, segment = work // segments, work % segments
    first_row = (segment * heads.kv_heads + head) * MAX_PARTIAL_ROWS
    fields: Any = np.int64(0)
    while True:
        first = int(parts.requests[fields + FIRST_PARTIAL])
        if first >= 0 and segment < first + int(parts.requests[fields + SEGMENTS]):
            break
        fields += REQUEST_FIELDS
    part = int(parts.requests[fields + END_PART]) - 1
    own = part_keys(parts, part, kv, head)
    segment -= first
    if segment * SEGMENT >= own.quantized:
        return
    row, rows = int(parts.requests[fields + FIRST_ROW]), int(parts.requests[fields + ROWS])
    group, factor = heads.group, parts.factors[2 * part]
    load_queries(kv, queries, row, rows, head * group, group, heads, factor, memory.queries)
    dim, found, count = heads.head_dim, memory.segment, rows * group
    call_kernel(
        parts.quantized.kernel,
        (kv, own, np.int64(segment), np.int64(threads), count, group, dim, memory, found),
    )
    for i in range(2 * count):
        parts.partial_states[2 * first_row + i] = found.states[i]
    for i in range(0, dim * count, LANES):
        store(parts.partial_sums, dim * first_row + i, load(found.sums, i))


@kernel
def _attend_gathered(
    kv: LayerKV, heads: AttentionHeads, parts: AttentionParts, part: PartKeys, keys: KeyList,
    visible_at: int, rows: int, group: int, memory: PartScratch, totals: SoftmaxSums,
) -> int:  # fmt: skip
    """Compute a block's attention over gathered keys to ``totals``; return their number.

    What quantised keys gave is in ``totals``.
    """
    dim, base = heads.head_dim, part.head.base * 0
    cells = part.head.cells
    seen = cells + int(parts.visible[visible_at + rows - 1])
    top: Any = np.int64(0)
    at, read = top, top
    numbers, places = memory.numbers, memory.cells
    count, cursor = gather_keys(part, keys, start_list(keys), seen, numbers, places, at)
    while count > 0:
        following = SEGMENT - at
        next_count, cursor = gather_keys(part, keys, cursor, seen, numbers, places, following)
        count_seen(numbers, at, count, parts.visible, visible_at, cells, rows, memory.ends)
        shape = SegmentRows(rows * group, group, 0, 0, dim, memory.ends, 0, 0)
        span = KVSpan(kv.cache.keys, base, places, at, count)
        ahead = KVSpan(kv.cache.keys, base, places, following, next_count)
        is_first = read == 0 and part.quantized == 0
        out = totals if is_first else memory.segment
        _attend_segment(kv, part, shape, span, at, base, ahead, memory, out)
        if not is_first:
            merge_rows(totals, memory.segment, top, rows * group, dim)
        read += count
        at, count = following, next_count
    return int(read)


@kernel
def _attend_slots(
    kv: LayerKV, heads: AttentionHeads, parts: AttentionParts, part: PartKeys, visible_at: int,
    rows: int, group: int, memory: PartScratch, totals: SoftmaxSums,
) -> int:  # fmt: skip
    """Compute a block's attention over a part's slots to ``totals``; return their number.

    What quantised keys gave is in ``totals``.
    """
    dim, slots, first = heads.head_dim, parts.kv_slots, part.head.slots_at
    base = part.head.base * dim
    seen = int(parts.visible[visible_at + rows - 1])
    top: Any = np.int64(0)
    for start in range(top, seen, SEGMENT):
        count = min(SEGMENT, seen - start)
        shape = SegmentRows(rows * group, group, 0, 0, dim, parts.visible, visible_at, start)
        span = KVSpan(kv.cache.keys, base, slots, first + start, count)
        following = min(SEGMENT, max(seen - start - SEGMENT, 0))
        ahead = KVSpan(kv.cache.keys, base, slots, first + start + count, following)
        is_first = start == 0 and part.quantized == 0
        out = totals if is_first else memory.segment
        _attend_segment(kv, part, shape, span, top, part.head.base, ahead, memory, out)
        if not is_first:
            merge_rows(totals, memory.segment, top, rows * group, dim)
    return seen


@kernel
def _raise_masses(totals: SoftmaxSums, rows: int, power: float) -> None:
    """Raise the mass of a part's keys, the sum of exp(score), to a power, for each row."""
    for row in range(rows):
        if totals.states[2 * row + 1] > np.float32(0.0):
            rest = np.log(np.float64(totals.states[2 * row + 1]))
            mass = np.float64(totals.states[2 * row]) + rest
            totals.states[2 * row] = np.float32(power * mass - rest)


@kernel
def _attend_block(
    kv: LayerKV, heads: AttentionHeads, parts: AttentionParts, queries: Queries, request: int,
    block: int, head: int, group: int, memory: PartScratch, out: Activations,
) -> None:  # fmt: skip
    """Compute the attention of a block of rows, in ``group`` query heads from ``head`` on."""
    fields, dim = request * REQUEST_FIELDS, heads.head_dim
    lists_at = int(parts.requests[fields + LISTS])
    size = _block_rows(parts, request, group)
    first_row = block * size
    rows = min(size, int(parts.requests[fields + ROWS]) - first_row)
    row = int(parts.requests[fields + FIRST_ROW]) + first_row
    first, end = int(parts.requests[fields + FIRST_PART]), int(parts.requests[fields + END_PART])
    top: Any = np.int64(0)
    for part in range(first, end):
        own = part_keys(parts, part, kv, head // heads.group)
        visible_at = int(parts.parts[part * PART_FIELDS + VISIBLE_AT]) + first_row
        factor, power = parts.factors[2 * part], parts.factors[2 * part + 1]
        totals = memory.totals if part == first else memory.part
        load_queries(kv, queries, row, rows, head, group, heads, factor, memory.queries)
        # A request's lists are of its last part's keys.
        unit = lists_at + block * heads.query_heads + head
        keys = list_of(parts, unit if lists_at >= 0 and part + 1 == end else -1)
        clear_states(totals.states, top, rows * group)
        if own.quantized > 0:
            partial = int(parts.requests[fields + FIRST_PARTIAL]) if part + 1 == end else -1
            _attend_quantized(
                kv, parts, own, partial, head // heads.group, heads, rows * group, group, memory,
                totals,
            )  # fmt: skip
        if keys.listed or own.head.cells > 0:
            read = _attend_gathered(
                kv, heads, parts, own, keys, visible_at, rows, group, memory, totals
            )
        else:
            read = _attend_slots(kv, heads, parts, own, visible_at, rows, group, memory, totals)
        if keys.listed:
            parts.pairs[unit] += rows * read
        if power != 1.0:
            _raise_masses(totals, rows * group, power)
        if part > first:
            merge_rows(memory.totals, memory.part, top, rows * group, dim)
    for r in range(rows * group):
        at = ((row + r // group) * heads.query_heads + head + r % group) * dim
        add_sink(heads, memory.totals.states, r, head + r % group)
        finish_row(memory.totals, r, dim, out.values, at)
        transform_for(kv.cache.values, out.values, at, dim)
        quantize(out, at, dim)


@entry_point
def attend_parts(
    thread: int, threads: int, sync: Int64Array, kv: LayerKV, heads: AttentionHeads,
    queries: Queries, parts: AttentionParts, out: Activations,
) -> None:  # fmt: skip
    """Run one layer's attention of the requests with parts, as one phase of the forward pass.

    Called through its address (calls.py), between two barriers.

    Args:
        thread, threads, sync: see ThreadPool.run.
        kv: the layer's KV, the batch's own rows written.
        heads: the layer's attention; it has no window.
        queries: of all rows of the batch.
        parts: the requests.
        out: [rows of the batch, query_heads * head_dim].
    """
    if parts.selector.kernel != 0:
        call_kernel(parts.selector.kernel, (thread, threads, sync, kv, heads, queries, parts))
    memory = cut_scratch(parts.scratch[thread], parts.numbers[thread], heads.head_dim)
    requests = len(parts.requests) // REQUEST_FIELDS
    units = int(parts.requests[(requests - 1) * REQUEST_FIELDS + FIRST_UNIT])
    units += _units(parts, requests - 1, heads)
    partials = len(parts.partial_states) // (2 * MAX_PARTIAL_ROWS)
    if partials > 0:
        work = take_work(sync, 1)
        while work < partials:
            _attend_partial(kv, heads, parts, queries, work, partials, threads, memory)
            work = take_work(sync, 1)
        barrier(sync, threads)
    work = take_work(sync, 1)
    while work < units:
        request = requests - 1
        while parts.requests[request * REQUEST_FIELDS + FIRST_UNIT] > work:
            request -= 1
        own = work - int(parts.requests[request * REQUEST_FIELDS + FIRST_UNIT])
        group = _group(parts, request, heads)
        width = heads.query_heads // group
        # The last blocks have the most keys; starting with them evens out the end.
        block = _units(parts, request, heads) // width - 1 - own // width
        head = own % width * group
        _attend_block(kv, heads, parts, queries, request, block, head, group, memory, out)
        work = take_work(sync, 1)


@kernel
def _units(parts: AttentionParts, request: int, heads: AttentionHeads) -> int:
    """Return how many units of work a request has, see ``runners.cpu.parts``."""
    group = _group(parts, request, heads)
    size = _block_rows(parts, request, group)
    blocks = (int(parts.requests[request * REQUEST_FIELDS + ROWS]) + size - 1) // size
    return blocks * (heads.query_heads // group)


@kernel
def _block_rows(parts: AttentionParts, request: int, group: int) -> int:
    """Return how many rows of a request share a unit, of ``group`` query heads."""
    first = parts.selector.first
    return 1 if len(first) > 0 and first[request] >= 0 else BLOCK // group


@kernel
def _group(parts: AttentionParts, request: int, heads: AttentionHeads) -> int:
    """Return how many query heads share a unit of a request."""
    has_lists = parts.requests[request * REQUEST_FIELDS + LISTS] >= 0
    return 1 if has_lists or heads.group > BLOCK else heads.group
