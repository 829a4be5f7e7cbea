"""Blocks of keys that rows choose by a tree search, in each layer and query head, within a step.

Source: Lee et al., "A Training-free Sub-quadratic Cost Transformer Model Serving Framework with
Hierarchically Pruned Attention", ICLR 2025, arXiv 2406.09827 (HiP).

A row always reads the first keys (*sinks*) and the last ones (its *window*). Those in between are
cut into blocks, from the first on, and the blocks into as many nodes as blocks are chosen. Every
round halves each node, scores the halves by one block of each, its *representative*, by the most
that q.k is for any key in it, and keeps the best half of the halves, until nodes are single
blocks. So a choice of m of n blocks takes at most 2 * m * ceil(log2(n / m)) scores, and keeps
nothing of the keys from step to step. The exact choice, of the best of all n blocks, is there to
tell what the search misses.

Blocks of rows may search together, while a prompt is computed: a block of keys then scores the most
that q.k is for any of their queries, and the window is that of the first of them.

As with pages (``page_selection``), rows that use an earlier choice read everything from its window
on: no key is lost between the window and the blocks, and rows read a few keys more than the window
until the next choice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.runners.forward.page_selection import Search

BlockScore = Callable[[Int32Array], Float32Array]
"""Scores blocks by their numbers, [n] int32: [n]."""


@dataclass(frozen=True)
class TreeRule:
    """How many blocks are read, and how they are searched; implements ``SelectionRule``.

    Attributes:
        blocks: that are chosen; 0 reads sinks and window alone.
        block: keys per block.
        window: last keys that a row reads, its own included; at least 1.
        sinks: first keys that every row reads.
        search: how blocks are found, not by summaries.
    """

    blocks: int
    block: int = 2
    window: int = 256
    sinks: int = 16
    search: Search = Search.CENTRES

    @property
    def width(self) -> int:
        """See ``SelectionRule``: the window's first key, and the blocks."""
        return self.blocks + 1

    @property
    def spans(self) -> int:
        """See ``SelectionRule``: sinks, blocks and window."""
        return self.blocks + 2

    @property
    def page(self) -> int:
        """See ``SelectionRule``: a block."""
        return self.block

    @property
    def summary(self) -> int:
        """See ``SelectionRule``: none."""
        return 0

    def check(self) -> None:
        """See ``SelectionRule``."""
        if min(self.blocks, self.sinks) < 0 or min(self.block, self.window) < 1:
            raise ValueError(f"{self} needs a window and blocks of at least one key")
        if self.search is Search.SUMMARIES:
            raise ValueError(f"{self} has no summaries to search")

    def first(self, seen: int) -> int:
        """See ``SelectionRule``: the window's first key."""
        return max(seen - self.window, 0)

    def candidates(self, seen: int) -> int:
        """See ``SelectionRule``: blocks between sinks and window, the last one possibly cut."""
        return -(-max(self.first(seen) - self.sinks, 0) // self.block)

    def summaries(self, seen: int) -> int:
        """See ``SelectionRule``: none."""
        return 0

    def tail(self, first: int) -> int:
        """See ``SelectionRule``."""
        return first

    def span(self, number: int) -> tuple[int, int]:
        """See ``SelectionRule``."""
        start = self.sinks + number * self.block
        return start, start + self.block

    def choose(self, query: Float32Array, keys: Float32Array) -> Int32Array:
        """See ``SelectionRule``."""
        return self.choose_together(query[None], keys)

    def choose_together(self, queries: Float32Array, keys: Float32Array) -> Int32Array:
        """Return what several queries choose together, of more keys than they take.

        Args:
            queries: [queries, head_dim], rotated.
            keys: [n, head_dim], rotated, those that the first of the rows sees.

        Returns:
            [width] int32.
        """
        first, candidates = self.first(len(keys)), self.candidates(len(keys))

        def scores(blocks: Int32Array) -> Float32Array:
            numbers = self.sinks + blocks[:, None] * self.block + np.arange(self.block)
            found = (keys[np.minimum(numbers, first - 1)] @ queries.T).max(axis=2)
            best: Float32Array = np.where(numbers < first, found, -np.inf).max(axis=1)
            return best

        if self.search is Search.EVERY_KEY:
            every = scores(np.arange(candidates, dtype=np.int32))
            best = np.argsort(-every, kind="stable")[: self.blocks]
            found = np.sort(best).astype(np.int32)
        else:
            centre = self.search is Search.CENTRES
            found = search_blocks(scores, candidates, self.blocks, centre=centre)
        return np.concatenate(([first], found)).astype(np.int32)


def search_blocks(score: BlockScore, candidates: int, kept: int, *, centre: bool) -> Int32Array:
    """Return the blocks that a tree search finds, ascending: [kept] int32.

    Args:
        score: of blocks.
        candidates: how many blocks there are, at least ``kept``.
        kept: how many nodes survive a round. Of equal ones, the first is better.
        centre: whether a node's representative is its centre; otherwise it is its first block.
    """
    bounds = np.arange(kept + 1, dtype=np.int64) * candidates // max(kept, 1)
    starts, lengths = bounds[:-1], np.diff(bounds)
    while lengths.max(initial=0) > 1:
        half = lengths // 2
        starts = np.stack((starts, starts + half), axis=1).reshape(-1)
        lengths = np.stack((half, lengths - half), axis=1).reshape(-1)
        exists = lengths > 0
        representatives = starts + lengths // 2 if centre else starts
        scores = np.full(len(starts), -np.inf, np.float32)
        scores[exists] = score(representatives[exists].astype(np.int32))
        best = np.sort(np.argsort(-scores, kind="stable")[:kept])
        starts, lengths = starts[best], lengths[best]
    return starts.astype(np.int32)
