"""Searches blocks of keys by halving: the compiled form of ``runners.forward.tree_search``.

One thread searches for a query head, and reads the keys themselves. The nodes of a search lie in
the request's record, first their starts, then their lengths, both in order. A choice of the best of
all blocks is a search of one round, whose nodes are single blocks. Blocks of a prompt's rows search
outside of a step's call, before a layer's attention (``search_keys``).
"""

from typing import Any, NamedTuple

import numpy as np

from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.attention_parts import AttentionParts
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.kv_cache import LayerKV, load_entry
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.parts.keys import PartRows, part_keys
from midfill.kernels.cpu.parts.page_summaries import key_cell
from midfill.kernels.cpu.ragged_cells import HeadKeys
from midfill.kernels.cpu.simd import LANES, fma, load, splat, sum_lanes
from midfill.kernels.cpu.thread_pool import barrier, take_work

SEARCH_ROOM = 2
"""Numbers, and scores, that a search needs room for per node that it ranks at once."""


class BlockSearch(NamedTuple):
    """Blocks of keys, and the queries that search them together.

    Attributes:
        queries: float32, those of all rows of the batch.
        at: where the first one starts.
        rows: how many there are.
        stride: from the start of one to that of the next.
        dim: their length.
        first, end: blocks are of keys first <= i < end.
        size: keys per block.
    """

    queries: Float32Array
    at: int
    rows: int
    stride: int
    dim: int
    first: int
    end: int
    size: int


@kernel
def block_score(
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, search: BlockSearch, block: int
) -> Any:
    """Return the most that q.k is for any query and any key of a block: float32."""
    best, dim, first = np.float32(-np.inf), search.dim, search.first + block * search.size
    for number in range(first, min(first + search.size, search.end)):
        key_at = key_cell(parts, head, number) * dim
        for query in range(search.rows):
            query_at, total = search.at + query * search.stride, splat(0.0)
            for d in range(0, dim, LANES):
                key = load_entry(kv.cache.keys, key_at + d)
                total = fma(load(search.queries, query_at + d), key, total)
            best = max(best, sum_lanes(total))
    return best


@kernel
def split_nodes(parts: AttentionParts, nodes_at: int, count: int) -> int:
    """Halve each of ``count`` nodes, from the last on, in place; return the longest half's length.

    A node of one block has an empty first half.
    """
    nodes, lengths_at, longest = parts.selector.numbers, nodes_at + 2 * count, 0
    for i in range(count - 1, -1, -1):
        start, length = int(nodes[nodes_at + i]), int(nodes[lengths_at + i])
        half = length // 2
        nodes[nodes_at + 2 * i] = np.int32(start)
        nodes[nodes_at + 2 * i + 1] = np.int32(start + half)
        nodes[lengths_at + 2 * i] = np.int32(half)
        nodes[lengths_at + 2 * i + 1] = np.int32(length - half)
        longest = max(longest, length - half)
    return longest


@kernel
def rank_score(scores: Float32Array, at: int, count: int, rank: int) -> float:
    """Return the rank-th largest of scores[at : at + count], which are put in another order.

    Quickselect; one that is no number counts as equal to any other.
    """
    low, high = 0, count
    while True:
        pivot = scores[at + (low + high) // 2]
        larger, i, smaller = low, low, high  # [low, larger) are larger, [smaller, high) smaller
        while i < smaller:
            score = scores[at + i]
            if score > pivot:
                scores[at + i] = scores[at + larger]
                scores[at + larger] = score
                larger += 1
                i += 1
            elif score < pivot:
                smaller -= 1
                scores[at + i] = scores[at + smaller]
                scores[at + smaller] = score
            else:
                i += 1
        if rank <= larger:
            high = larger
        elif rank <= smaller:
            return pivot
        else:
            low = smaller


@kernel
def keep_best(
    parts: AttentionParts, nodes_at: int, ranked: int, count: int, scores_at: int
) -> None:
    """Keep the best ``count`` of ``ranked`` nodes, in order; of equal ones, the first.

    Args:
        parts: hold nodes and scores.
        nodes_at: where the nodes start in ``selector.numbers``.
        ranked, count: see above.
        scores_at: where the scores start in ``selector.scores``; as many behind them are scratch.
    """
    scores, nodes, lengths_at = parts.selector.scores, parts.selector.numbers, nodes_at + ranked
    for i in range(ranked):
        scores[scores_at + ranked + i] = scores[scores_at + i]
    least = rank_score(scores, scores_at + ranked, ranked, count)
    equal, kept = count, 0
    for i in range(ranked):
        if scores[scores_at + i] > least:
            equal -= 1
    for i in range(ranked):
        score = scores[scores_at + i]
        if not score > least:
            if score < least or equal <= 0:
                continue
            equal -= 1
        nodes[nodes_at + kept] = nodes[nodes_at + i]
        nodes[lengths_at + kept] = nodes[lengths_at + i]
        kept += 1


@kernel
def score_nodes(
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, search: BlockSearch, count: int,
    by_centre: int, nodes_at: int, scores_at: int,
) -> None:  # fmt: skip
    """Score ``count`` nodes by a block of each; see ``search_tree``. Empty ones score -inf."""
    numbers, scores = parts.selector.numbers, parts.selector.scores
    for i in range(count):
        length = int(numbers[nodes_at + count + i])
        if length == 0:
            scores[scores_at + i] = np.float32(-np.inf)
            continue
        block = int(numbers[nodes_at + i])
        if by_centre:
            block += length // 2
        scores[scores_at + i] = block_score(parts, kv, head, search, block)


@kernel
def search_tree(
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, search: BlockSearch, count: int,
    by_centre: int, nodes_at: int, scores_at: int, chosen_at: int,
) -> None:  # fmt: skip
    """Write the blocks that a search finds to numbers[chosen_at:], ascending.

    Args:
        parts, kv, head: say where the keys are.
        search: blocks and queries.
        count: how many blocks are chosen; there are more.
        by_centre: whether a node is scored by its centre, not by its first block.
        nodes_at, scores_at: where nodes and scores may be written.
        chosen_at: see above.
    """
    numbers, lengths_at, longest = parts.selector.numbers, nodes_at + 2 * count, 0
    blocks = (search.end - search.first + search.size - 1) // search.size
    for i in range(count):
        start, after = i * blocks // count, (i + 1) * blocks // count
        numbers[nodes_at + i] = np.int32(start)
        numbers[lengths_at + i] = np.int32(after - start)
        longest = max(longest, after - start)
    while longest > 1:
        longest = split_nodes(parts, nodes_at, count)
        score_nodes(parts, kv, head, search, 2 * count, by_centre, nodes_at, scores_at)
        keep_best(parts, nodes_at, 2 * count, count, scores_at)
    for i in range(count):
        numbers[chosen_at + i] = numbers[nodes_at + i]


@kernel
def rank_blocks(
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, search: BlockSearch, count: int,
    nodes_at: int, scores_at: int, chosen_at: int,
) -> None:  # fmt: skip
    """Write the best of all blocks to numbers[chosen_at:], ascending; see ``search_tree``."""
    numbers, by_first = parts.selector.numbers, 0
    blocks = (search.end - search.first + search.size - 1) // search.size
    for i in range(blocks):
        numbers[nodes_at + i] = np.int32(i)
        numbers[nodes_at + blocks + i] = np.int32(1)
    score_nodes(parts, kv, head, search, blocks, by_first, nodes_at, scores_at)
    keep_best(parts, nodes_at, blocks, count, scores_at)
    for i in range(count):
        numbers[chosen_at + i] = numbers[nodes_at + i]


@kernel
def choose_all(parts: AttentionParts, chosen_at: int, width: int) -> None:
    """Write the choice of a row that reads all of its keys."""
    numbers = parts.selector.numbers
    numbers[chosen_at] = np.int32(0)
    for i in range(1, width):
        numbers[chosen_at + i] = np.int32(-1)


class RowSearch(NamedTuple):
    """How blocks of rows search; see ``runners.forward.tree_search``.

    Attributes:
        block_rows: rows per block.
        stride: every so many rows of a block search.
        blocks: of keys that are chosen.
        size: keys per block of keys.
        window, sinks: last and first keys that are not searched.
        by_centre: see ``search_tree``.
    """

    block_rows: int
    stride: int
    blocks: int
    size: int
    window: int
    sinks: int
    by_centre: int


@entry_point
def search_keys(
    thread: int, threads: int, sync: Int64Array, kv: LayerKV, heads: AttentionHeads,
    queries: Queries, parts: AttentionParts, own: PartRows, rule: RowSearch,
) -> None:  # fmt: skip
    """Search in each query head for blocks of rows: ``LayerProbe.search``.

    Args:
        thread, threads, sync: see ThreadPool.run.
        kv: the layer's KV, the batch's own rows written.
        heads: the layer's attention; it has no window.
        queries: of all rows of the batch.
        parts: of the batch; its selector has ``numbers`` for the choices,
            [blocks of rows, query_heads, rule.blocks + 1], and behind them for nodes, as many as it
            has scores, [blocks of rows, query_heads, 2 * SEARCH_ROOM * rule.blocks].
        own: the rows, and the part that is searched.
        rule: how they search.
    """
    count, block_rows, stride = rule.blocks, rule.block_rows, rule.stride
    units = (own.rows + block_rows - 1) // block_rows * heads.query_heads
    room, dim = 2 * SEARCH_ROOM * count, heads.head_dim
    unit = take_work(sync, 1)
    while unit < units:
        first, query_head = unit // heads.query_heads * block_rows, unit % heads.query_heads
        head = part_keys(parts, own.part, kv, query_head // heads.group).head
        end = head.cells + int(parts.visible[own.visible_at + first]) - rule.window
        chosen_at = unit * (count + 1)
        if end - rule.sinks <= count * rule.size:
            choose_all(parts, chosen_at, count + 1)
        else:
            parts.selector.numbers[chosen_at] = np.int32(end)
            searching = (min(block_rows, own.rows - first) + stride - 1) // stride
            query_at = (own.row + first) * queries.stride + query_head * dim
            search = BlockSearch(
                queries.values, query_at, searching, stride * queries.stride, dim, rule.sinks, end,
                rule.size,
            )  # fmt: skip
            nodes_at = units * (count + 1) + unit * room
            search_tree(
                parts, kv, head, search, count, rule.by_centre, nodes_at, unit * room, chosen_at + 1
            )
        unit = take_work(sync, 1)
    barrier(sync, threads)
