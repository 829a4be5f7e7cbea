"""A tree search over blocks of keys, by loops over rounds, nodes, keys and channels."""

import math

import numpy as np

from midfill.runners.forward.page_selection import Search
from midfill.runners.forward.tree_search import TreeRule


def naive_choice(queries: np.ndarray, keys: np.ndarray, rule: TreeRule) -> list[int]:
    """Return what queries [queries, head_dim] choose together of keys [keys, head_dim]."""
    end = len(keys) - rule.window
    if end - rule.sinks <= rule.blocks * rule.block:
        return [0] + [-1] * rule.blocks
    count = math.ceil((end - rule.sinks) / rule.block)

    def score(block: int) -> float:
        first = rule.sinks + block * rule.block
        return max(
            sum(float(a) * float(b) for a, b in zip(query, keys[i], strict=True))
            for query in queries
            for i in range(first, min(first + rule.block, end))
        )

    if rule.search is Search.EVERY_KEY:
        best = sorted((-score(block), block) for block in range(count))[: rule.blocks]
        return [end, *sorted(block for _, block in best)]
    bounds = [j * count // max(rule.blocks, 1) for j in range(rule.blocks + 1)]
    nodes = [(bounds[j], bounds[j + 1] - bounds[j]) for j in range(rule.blocks)]
    while any(length > 1 for _, length in nodes):
        children = []
        for start, length in nodes:
            half = length // 2
            children += [(start, half), (start + half, length - half)]
        scored = []
        for start, length in children:
            if length == 0:
                continue
            block = start + length // 2 if rule.search is Search.CENTRES else start
            scored.append((-score(block), start, length))
        nodes = sorted((start, length) for _, start, length in sorted(scored)[: rule.blocks])
    return [end, *(start for start, _ in nodes)]
