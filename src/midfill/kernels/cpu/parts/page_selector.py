"""Chooses pages of keys by a row's query, within the step, before a layer's attention.

The plain form of it, which torch runs, is ``runners.forward.page_selection``. Three phases: threads
share the pages that have no summary yet (page_summaries.py), then the pages that are scored, then
the query heads, each of which takes the best pages of its scores and writes its rows' lists.

A request's record in ``SelectorTable.numbers`` has the fields below, then what they point at:

    heads     [layers * kv_heads], 1 where a head's rows choose; otherwise they attend to all keys
    of_row    [rows], the number of the choice that a row's keys are of
    made_by   [choices], the row whose query makes it; -1 if it was made before
    entries   [n], which summaries the request's pages have
    missing   [n], places in ``entries`` of those that are written first
    chosen    [choices, layers, query_heads, pages], see ``PageSelection``
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.attention_parts import (
    END_PART,
    FIRST_ROW,
    LISTS,
    PART_FIELDS,
    REQUEST_FIELDS,
    ROWS,
    SLOTS_AT,
    VISIBLE_AT,
    AttentionParts,
)
from midfill.kernels.cpu.jit import entry_point, inlined_kernel, kernel
from midfill.kernels.cpu.kv_cache import LayerKV
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.parts.page_summaries import (
    bound_scores,
    load_summary,
    split_query,
    summarize_keys,
    summary_at,
)
from midfill.kernels.cpu.ragged_cells import HeadKeys, find_keys
from midfill.kernels.cpu.thread_pool import barrier, take_work

(
    SUMMARY, PAGE, PAGES, CHOICES, MISSING, MOST_PAGES, HEADS_AT, OF_ROW_AT, MADE_BY_AT, ENTRIES_AT,
    MISSING_AT, CHOSEN_AT, SCORES_AT,
) = range(13)  # fmt: skip
RECORD_FIELDS = 13
"""Keys per summary and per page; pages that a row reads, its newest included; numbers of choices,
of missing summaries and of pages that are scored at most; places of the arrays in the record;
place of the request's scores, [choices, query_heads, MOST_PAGES], in ``SelectorTable.scores``."""

SCORED_PAGES = 32
"""Pages of a unit of work."""
MAX_GROUP = 16
"""Query heads that may share a KV head."""
ALL = np.iinfo(np.int32).max
_SUMMARIZE, _SCORE, _LIST = range(3)


@inlined_kernel
def _request_keys(parts: AttentionParts, kv: LayerKV, request: int, kv_head: int) -> HeadKeys:
    """Return where the keys of a request's last part lie in a head."""
    part = int(parts.requests[request * REQUEST_FIELDS + END_PART]) - 1
    slots_at = int(parts.parts[part * PART_FIELDS + SLOTS_AT])
    return find_keys(parts.ragged, part, kv, kv_head, slots_at)


@inlined_kernel
def _seen(parts: AttentionParts, request: int, head: HeadKeys, row: int) -> int:
    """Return how many keys of a head a request's row sees."""
    part = int(parts.requests[request * REQUEST_FIELDS + END_PART]) - 1
    visible_at = int(parts.parts[part * PART_FIELDS + VISIBLE_AT])
    return head.cells + int(parts.visible[visible_at + row])


@kernel
def _units(parts: AttentionParts, request: int, phase: int, heads: AttentionHeads) -> int:
    """Return how many units of work a request has in a phase."""
    record, numbers = int(parts.selector.first[request]), parts.selector.numbers
    if record < 0:
        return 0
    if phase == _LIST:
        return heads.query_heads
    if heads.window > 0:
        return 0
    if phase == _SUMMARIZE:
        return int(numbers[record + MISSING]) * heads.kv_heads
    blocks = (int(numbers[record + MOST_PAGES]) + SCORED_PAGES - 1) // SCORED_PAGES
    return int(numbers[record + CHOICES]) * heads.kv_heads * blocks


@kernel
def _summarize(
    parts: AttentionParts, kv: LayerKV, request: int, unit: int, heads: AttentionHeads
) -> None:
    """Write a missing summary of one KV head."""
    record, numbers = int(parts.selector.first[request]), parts.selector.numbers
    kv_head, number = unit % heads.kv_heads, unit // heads.kv_heads
    head = _request_keys(parts, kv, request, kv_head)
    if not numbers[record + numbers[record + HEADS_AT] + head.base // kv.slots]:
        return
    page = int(numbers[record + numbers[record + MISSING_AT] + number])
    entry = int(numbers[record + numbers[record + ENTRIES_AT] + page])
    size, dim = int(numbers[record + SUMMARY]), heads.head_dim
    at = summary_at(parts, kv, head, entry, dim)
    summarize_keys(parts, kv, head, page * size, size, dim, at)


@kernel
def _score(
    parts: AttentionParts, kv: LayerKV, request: int, unit: int, heads: AttentionHeads,
    queries: Queries, scratch: Float32Array,
) -> None:  # fmt: skip
    """Score some pages for one choice and the query heads of one KV head."""
    record, numbers = int(parts.selector.first[request]), parts.selector.numbers
    most, dim, group = int(numbers[record + MOST_PAGES]), heads.head_dim, heads.group
    blocks = (most + SCORED_PAGES - 1) // SCORED_PAGES
    block, rest = unit % blocks, unit // blocks
    kv_head, choice = rest % heads.kv_heads, rest // heads.kv_heads
    row = int(numbers[record + numbers[record + MADE_BY_AT] + choice])
    head = _request_keys(parts, kv, request, kv_head)
    if row < 0 or not numbers[record + numbers[record + HEADS_AT] + head.base // kv.slots]:
        return
    size, page_size = int(numbers[record + SUMMARY]), int(numbers[record + PAGE])
    newest = (_seen(parts, request, head, row) - 1) // page_size
    if newest < int(numbers[record + PAGES]):
        return  # all keys are read
    query_row = int(parts.requests[request * REQUEST_FIELDS + FIRST_ROW]) + row
    query_at = query_row * queries.stride + kv_head * group * dim
    for g in range(group):
        split_query(queries.values, query_at + g * dim, dim, scratch, g * 2 * dim)
    loaded = group * 2 * dim
    entries_at = record + int(numbers[record + ENTRIES_AT])
    per_page = page_size // size
    scores_at = int(numbers[record + SCORES_AT])
    scores_at += (choice * heads.query_heads + kv_head * group) * most
    scores, summaries = parts.selector.scores, parts.selector.summaries
    for page in range(block * SCORED_PAGES, min(newest, (block + 1) * SCORED_PAGES)):
        for part in range(per_page):
            entry = int(numbers[entries_at + page * per_page + part])
            load_summary(summaries, summary_at(parts, kv, head, entry, dim), dim, scratch, loaded)
            for g in range(group):
                found = bound_scores(scratch, g * 2 * dim, loaded, dim)
                place = scores_at + g * most + page
                if part == 0 or found > scores[place]:
                    scores[place] = found


@kernel
def _worst(parts: AttentionParts, scores_at: int, chosen_at: int, count: int) -> int:
    """Return which of the chosen pages has the lowest score; of equal ones the last."""
    scores, numbers = parts.selector.scores, parts.selector.numbers
    found, least = 0, scores[scores_at + numbers[chosen_at]]
    for i in range(1, count):
        score = scores[scores_at + numbers[chosen_at + i]]
        if score <= least:
            found, least = i, score
    return found


@kernel
def _choose(parts: AttentionParts, scores_at: int, newest: int, pages: int, chosen_at: int) -> None:
    """Write the newest page, then the best ``pages`` - 1 before it, ascending, to the record."""
    scores, numbers, count = parts.selector.scores, parts.selector.numbers, pages - 1
    numbers[chosen_at] = np.int32(newest)
    first = chosen_at + 1
    for i in range(count):
        numbers[first + i] = np.int32(i)
    worst = _worst(parts, scores_at, first, count)
    for page in range(count, newest):
        if scores[scores_at + page] > scores[scores_at + numbers[first + worst]]:
            for i in range(worst, count - 1):
                numbers[first + i] = numbers[first + i + 1]
            numbers[first + count - 1] = np.int32(page)
            worst = _worst(parts, scores_at, first, count)


@kernel
def _list(
    parts: AttentionParts, kv: LayerKV, request: int, query_head: int, heads: AttentionHeads
) -> None:
    """Make the choices of a query head, and write the lists of its rows."""
    record, numbers = int(parts.selector.first[request]), parts.selector.numbers
    head = _request_keys(parts, kv, request, query_head // heads.group)
    pages, page_size = int(numbers[record + PAGES]), int(numbers[record + PAGE])
    layer = kv.first_entry // (kv.slots * heads.kv_heads)
    layers = int(numbers[record + OF_ROW_AT] - numbers[record + HEADS_AT]) // heads.kv_heads
    chooses = numbers[record + numbers[record + HEADS_AT] + head.base // kv.slots] != 0
    most, chosen_at = int(numbers[record + MOST_PAGES]), record + int(numbers[record + CHOSEN_AT])
    stride = layers * heads.query_heads * pages
    chosen_at += (layer * heads.query_heads + query_head) * pages
    if heads.window <= 0:
        for choice in range(int(numbers[record + CHOICES])):
            row = int(numbers[record + numbers[record + MADE_BY_AT] + choice])
            if row < 0:
                continue
            at = chosen_at + choice * stride
            newest = (_seen(parts, request, head, row) - 1) // page_size
            if chooses and newest >= pages:
                scores_at = int(numbers[record + SCORES_AT])
                scores_at += (choice * heads.query_heads + query_head) * most
                _choose(parts, scores_at, newest, pages, at)
            else:
                numbers[at] = np.int32(0)
                for i in range(1, pages):
                    numbers[at + i] = np.int32(-1)
    unit = int(parts.requests[request * REQUEST_FIELDS + LISTS]) + query_head
    for row in range(int(parts.requests[request * REQUEST_FIELDS + ROWS])):
        span = int(parts.indptr[unit + row * heads.query_heads])
        end = int(parts.indptr[unit + row * heads.query_heads + 1])
        tail = 0
        if heads.window > 0:
            tail = max(_seen(parts, request, head, row) - int(heads.window), 0)
        else:
            choice = int(numbers[record + numbers[record + OF_ROW_AT] + row])
            at = chosen_at + choice * stride
            tail = int(numbers[at]) * page_size
            for i in range(1, pages):
                page = int(numbers[at + i])
                if page >= 0:
                    parts.spans[2 * span] = np.int32(page * page_size)
                    parts.spans[2 * span + 1] = np.int32((page + 1) * page_size)
                    span += 1
        parts.spans[2 * span] = np.int32(tail)
        parts.spans[2 * span + 1] = np.int32(ALL)
        for rest in range(span + 1, end):  # empty
            parts.spans[2 * rest] = np.int32(ALL)
            parts.spans[2 * rest + 1] = np.int32(ALL)


@entry_point
def select_pages(
    thread: int, threads: int, sync: Int64Array, kv: LayerKV, heads: AttentionHeads,
    queries: Queries, parts: AttentionParts,
) -> None:  # fmt: skip
    """Write the lists of a layer's rows whose pages are chosen; the arguments of ``attend_parts``.

    Called through its address, by all threads, which leave it together.
    """
    requests = len(parts.selector.first)
    scratch = parts.scratch[thread]
    top: Any = np.int64(0)
    for phase in range(top, 3):
        work = take_work(sync, 1)
        while True:
            request, unit = top, work
            while request < requests:
                units = _units(parts, request, phase, heads)
                if unit < units:
                    break
                unit -= units
                request += 1
            if request == requests:
                break
            if phase == _SUMMARIZE:
                _summarize(parts, kv, request, unit, heads)
            elif phase == _SCORE:
                _score(parts, kv, request, unit, heads, queries, scratch)
            else:
                _list(parts, kv, request, unit, heads)
            work = take_work(sync, 1)
        barrier(sync, threads)
