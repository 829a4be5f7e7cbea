"""Chooses pages of keys by a row's query, within the step, before a layer's attention.

The plain form of it, which torch runs, is ``runners.forward.page_selection``. Three phases: threads
share the pages that have no summary yet (page_summaries.py), then the pages that are scored, then
the query heads, each of which takes the best pages of its scores and writes its rows' lists. Where
blocks are found by a tree search (tree_search.py), the second phase's units are the searches, which
need no summaries and choose at once.

A request's record in ``SelectorTable.numbers`` has the fields below, then what they point at:

    heads     [layers * kv_heads], 1 where a head's rows choose; otherwise they attend to all keys
    of_row    [rows], the number of the choice that a row's keys are of
    made_by   [choices], the row whose query makes it; -1 if it was made before
    entries   [n], which summaries the request's pages have
    missing   [n], places in ``entries`` of those that are written first
    nodes     [choices, query_heads, ROOM], of tree searches alone
    chosen    [choices, layers, query_heads, WIDTH], see ``PageSelection``
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
from midfill.kernels.cpu.parts.tree_search import (
    BlockSearch,
    choose_all,
    rank_blocks,
    search_tree,
)
from midfill.kernels.cpu.ragged_cells import HeadKeys, find_keys
from midfill.kernels.cpu.thread_pool import barrier, take_work

(
    SUMMARY, PAGE, WIDTH, CHOICES, MISSING, ROOM, HEADS_AT, OF_ROW_AT, MADE_BY_AT, ENTRIES_AT,
    MISSING_AT, NODES_AT, CHOSEN_AT, SCORES_AT, SEARCH, SINKS, WINDOW,
) = range(17)  # fmt: skip
RECORD_FIELDS = 17
"""Keys per summary and per page; how many numbers a choice has; how many choices and missing
summaries there are; how many scores a choice needs in a query head; places of the arrays in the
record; place of the request's scores, [choices, query_heads, ROOM], in ``SelectorTable.scores``;
how pages are found; how many first and last keys are read in any case."""
BY_SUMMARIES, BY_CENTRES, BY_FIRSTS, BY_EVERY_KEY = range(4)
"""How pages are found: see ``runners.forward.page_selection.Search``."""

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


@inlined_kernel
def _searches(parts: AttentionParts, request: int) -> bool:
    """Return whether a request's pages are found by a search of keys."""
    return bool(parts.selector.numbers[parts.selector.first[request] + SEARCH] != BY_SUMMARIES)


@kernel
def _units(parts: AttentionParts, request: int, phase: int, heads: AttentionHeads) -> int:
    """Return how many units of work a request has in a phase."""
    record, numbers = int(parts.selector.first[request]), parts.selector.numbers
    if record < 0:
        return 0
    if phase == _LIST:
        return heads.query_heads
    if phase == _SUMMARIZE:
        return int(numbers[record + MISSING]) * heads.kv_heads
    if _searches(parts, request):
        return int(numbers[record + CHOICES]) * heads.query_heads
    blocks = (int(numbers[record + ROOM]) + SCORED_PAGES - 1) // SCORED_PAGES
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
    room, dim, group = int(numbers[record + ROOM]), heads.head_dim, heads.group
    blocks = (room + SCORED_PAGES - 1) // SCORED_PAGES
    block, rest = unit % blocks, unit // blocks
    kv_head, choice = rest % heads.kv_heads, rest // heads.kv_heads
    row = int(numbers[record + numbers[record + MADE_BY_AT] + choice])
    head = _request_keys(parts, kv, request, kv_head)
    if row < 0 or not numbers[record + numbers[record + HEADS_AT] + head.base // kv.slots]:
        return
    size, page_size = int(numbers[record + SUMMARY]), int(numbers[record + PAGE])
    newest = (_seen(parts, request, head, row) - 1) // page_size
    if newest < int(numbers[record + WIDTH]):
        return  # all keys are read
    query_row = int(parts.requests[request * REQUEST_FIELDS + FIRST_ROW]) + row
    query_at = query_row * queries.stride + kv_head * group * dim
    for g in range(group):
        split_query(queries.values, query_at + g * dim, dim, scratch, g * 2 * dim)
    loaded = group * 2 * dim
    entries_at = record + int(numbers[record + ENTRIES_AT])
    per_page = page_size // size
    scores_at = int(numbers[record + SCORES_AT])
    scores_at += (choice * heads.query_heads + kv_head * group) * room
    scores, summaries = parts.selector.scores, parts.selector.summaries
    for page in range(block * SCORED_PAGES, min(newest, (block + 1) * SCORED_PAGES)):
        for part in range(per_page):
            entry = int(numbers[entries_at + page * per_page + part])
            load_summary(summaries, summary_at(parts, kv, head, entry, dim), dim, scratch, loaded)
            for g in range(group):
                found = bound_scores(scratch, g * 2 * dim, loaded, dim)
                place = scores_at + g * room + page
                if part == 0 or found > scores[place]:
                    scores[place] = found


@inlined_kernel
def _choice_at(
    parts: AttentionParts, kv: LayerKV, record: int, choice: int, query_head: int,
    heads: AttentionHeads,
) -> int:  # fmt: skip
    """Return where a layer's and query head's choice starts in the numbers."""
    numbers = parts.selector.numbers
    layer = kv.first_entry // (kv.slots * heads.kv_heads)
    layers = int(numbers[record + OF_ROW_AT] - numbers[record + HEADS_AT]) // heads.kv_heads
    place = (choice * layers + layer) * heads.query_heads + query_head
    return record + int(numbers[record + CHOSEN_AT]) + place * int(numbers[record + WIDTH])


@kernel
def _search(
    parts: AttentionParts, kv: LayerKV, request: int, unit: int, heads: AttentionHeads,
    queries: Queries,
) -> None:  # fmt: skip
    """Make a choice of one query head by a search of keys."""
    record, numbers = int(parts.selector.first[request]), parts.selector.numbers
    query_head, choice = unit % heads.query_heads, unit // heads.query_heads
    row = int(numbers[record + numbers[record + MADE_BY_AT] + choice])
    if row < 0:
        return
    head = _request_keys(parts, kv, request, query_head // heads.group)
    chooses = numbers[record + numbers[record + HEADS_AT] + head.base // kv.slots] != 0
    count, size = int(numbers[record + WIDTH]) - 1, int(numbers[record + PAGE])
    chosen_at = _choice_at(parts, kv, record, choice, query_head, heads)
    sinks = int(numbers[record + SINKS])
    end = _seen(parts, request, head, row) - int(numbers[record + WINDOW])
    if not chooses or end - sinks <= count * size:
        choose_all(parts, chosen_at, count + 1)
        return
    numbers[chosen_at] = np.int32(end)
    query_row = int(parts.requests[request * REQUEST_FIELDS + FIRST_ROW]) + row
    query_at = query_row * queries.stride + query_head * heads.head_dim
    search = BlockSearch(
        queries.values, query_at, 1, queries.stride, heads.head_dim, sinks, end, size
    )
    room = int(numbers[record + ROOM])
    nodes_at = record + int(numbers[record + NODES_AT]) + unit * room
    scores_at = int(numbers[record + SCORES_AT]) + unit * room
    if numbers[record + SEARCH] == BY_EVERY_KEY:
        rank_blocks(parts, kv, head, search, count, nodes_at, scores_at, chosen_at + 1)
        return
    by_centre = int(numbers[record + SEARCH] == BY_CENTRES)
    search_tree(parts, kv, head, search, count, by_centre, nodes_at, scores_at, chosen_at + 1)


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
def _choose(parts: AttentionParts, scores_at: int, newest: int, count: int, chosen_at: int) -> None:
    """Write the newest page, then the best ``count`` before it, ascending, to the record."""
    scores, numbers = parts.selector.scores, parts.selector.numbers
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
    width, page_size = int(numbers[record + WIDTH]), int(numbers[record + PAGE])
    chooses = numbers[record + numbers[record + HEADS_AT] + head.base // kv.slots] != 0
    by_summaries = numbers[record + SEARCH] == BY_SUMMARIES
    sinks = int(numbers[record + SINKS])
    if by_summaries:
        for choice in range(int(numbers[record + CHOICES])):
            row = int(numbers[record + numbers[record + MADE_BY_AT] + choice])
            if row < 0:
                continue
            at = _choice_at(parts, kv, record, choice, query_head, heads)
            newest = (_seen(parts, request, head, row) - 1) // page_size
            if chooses and newest >= width:
                unit = choice * heads.query_heads + query_head
                scores_at = int(numbers[record + SCORES_AT]) + unit * int(numbers[record + ROOM])
                _choose(parts, scores_at, newest, width - 1, at)
            else:
                choose_all(parts, at, width)
    list_at = int(parts.requests[request * REQUEST_FIELDS + LISTS]) + query_head
    for row in range(int(parts.requests[request * REQUEST_FIELDS + ROWS])):
        span = int(parts.indptr[list_at + row * heads.query_heads])
        end = int(parts.indptr[list_at + row * heads.query_heads + 1])
        choice = int(numbers[record + numbers[record + OF_ROW_AT] + row])
        at = _choice_at(parts, kv, record, choice, query_head, heads)
        tail = int(numbers[at]) * (page_size if by_summaries else 1)
        if sinks > 0 and tail > 0:
            parts.spans[2 * span] = np.int32(0)
            parts.spans[2 * span + 1] = np.int32(sinks)
            span += 1
        for i in range(1, width):
            page = int(numbers[at + i])
            if page >= 0:
                start = sinks + page * page_size
                parts.spans[2 * span] = np.int32(start)
                parts.spans[2 * span + 1] = np.int32(min(start + page_size, tail))
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
            elif phase == _SCORE and _searches(parts, request):
                _search(parts, kv, request, unit, heads, queries)
            elif phase == _SCORE:
                _score(parts, kv, request, unit, heads, queries, scratch)
            else:
                _list(parts, kv, request, unit, heads)
            work = take_work(sync, 1)
        barrier(sync, threads)
