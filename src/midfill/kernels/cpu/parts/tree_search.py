"""Searches blocks of keys by halving: the compiled form of ``runners.forward.tree_search``.

One thread searches for a query head, and reads the keys themselves. The nodes of a search lie in
the request's record, first their starts, then their lengths, both in order. A choice of the best of
all blocks is a search of one round, whose nodes are single blocks.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.attention_parts import AttentionParts
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_cache import LayerKV, load_entry
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.parts.page_summaries import key_cell
from midfill.kernels.cpu.ragged_cells import HeadKeys
from midfill.kernels.cpu.simd import LANES, fma, load, splat, sum_lanes

SEARCH_ROOM = 2
"""Numbers, and scores, that a search needs room for per node that it ranks at once."""


@kernel
def block_score(
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, query: Float32Array, query_at: int,
    dim: int, first: int, end: int,
) -> Any:  # fmt: skip
    """Return the most that q.k is for keys first <= i < end of a head, at least one: float32."""
    best = np.float32(-np.inf)
    for number in range(first, end):
        key_at = key_cell(parts, head, number) * dim
        total = splat(0.0)
        for d in range(0, dim, LANES):
            total = fma(load(query, query_at + d), load_entry(kv.cache.keys, key_at + d), total)
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
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, query: Float32Array, query_at: int,
    dim: int, sinks: int, end: int, size: int, count: int, by_centre: int, nodes_at: int,
    scores_at: int,
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
        first = sinks + block * size
        scores[scores_at + i] = block_score(
            parts, kv, head, query, query_at, dim, first, min(first + size, end)
        )


@kernel
def search_tree(
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, query: Float32Array, query_at: int,
    dim: int, sinks: int, end: int, size: int, count: int, by_centre: int, nodes_at: int,
    scores_at: int, chosen_at: int,
) -> None:  # fmt: skip
    """Write the blocks that a query finds to numbers[chosen_at:], ascending.

    Args:
        parts, kv, head: say where the keys are.
        query, query_at, dim: the query.
        sinks, end: blocks are of keys sinks <= i < end.
        size: keys per block.
        count: how many blocks are chosen; there are more.
        by_centre: whether a node is scored by its centre, not by its first block.
        nodes_at, scores_at: where nodes and scores may be written.
        chosen_at: see above.
    """
    numbers = parts.selector.numbers
    blocks, lengths_at = (end - sinks + size - 1) // size, nodes_at + 2 * count
    longest = 0
    for i in range(count):
        start, after = i * blocks // count, (i + 1) * blocks // count
        numbers[nodes_at + i] = np.int32(start)
        numbers[lengths_at + i] = np.int32(after - start)
        longest = max(longest, after - start)
    while longest > 1:
        longest = split_nodes(parts, nodes_at, count)
        score_nodes(
            parts, kv, head, query, query_at, dim, sinks, end, size, 2 * count, by_centre,
            nodes_at, scores_at,
        )  # fmt: skip
        keep_best(parts, nodes_at, 2 * count, count, scores_at)
    for i in range(count):
        numbers[chosen_at + i] = numbers[nodes_at + i]


@kernel
def rank_blocks(
    parts: AttentionParts, kv: LayerKV, head: HeadKeys, query: Float32Array, query_at: int,
    dim: int, sinks: int, end: int, size: int, count: int, nodes_at: int, scores_at: int,
    chosen_at: int,
) -> None:  # fmt: skip
    """Write the best of all blocks to numbers[chosen_at:], ascending; see ``search_tree``."""
    numbers, blocks = parts.selector.numbers, (end - sinks + size - 1) // size
    for i in range(blocks):
        numbers[nodes_at + i] = np.int32(i)
        numbers[nodes_at + blocks + i] = np.int32(1)
    score_nodes(
        parts, kv, head, query, query_at, dim, sinks, end, size, blocks, 0, nodes_at, scores_at
    )
    keep_best(parts, nodes_at, blocks, count, scores_at)
    for i in range(count):
        numbers[chosen_at + i] = numbers[nodes_at + i]
