"""FlexPrefill: pattern and budget of each head from a share of its attention, prompt by prompt.

Source: Lai et al., "FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient
Long-Sequence Inference", ICLR 2025, arXiv 2502.20766.

The last rows' attention, added up by key and by distance, is compared by blocks with what mean
queries and mean keys estimate. Where both are alike (square root of the Jensen-Shannon divergence
below ``tau``), the estimate is trusted for all rows: the head takes the best pairs of blocks.
Elsewhere it takes columns and diagonals of blocks. Either takes as many as cover ``gamma``.

What differs from the paper: blocks of 64 keys instead of 128 and a least budget of 256 tokens
instead of 1,024, for prompts of thousands of tokens; prompts run in chunks, each of which is looked
at by its own last rows and lends budget among its own rows only.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int64Array
from midfill.methods.budget import require
from midfill.methods.sparse_prefill.method import PROBED_ROWS, ChunkRule
from midfill.methods.sparse_prefill.patterns import block_lists, largest
from midfill.runners.forward.attention import QUERY_BLOCK, LayerProbe, SpanLists, query_blocks

_BLOCKS = (64, 128)


@dataclass(frozen=True)
class FlexPrefill:
    """The method's hyper-parameters; implements ``PrefillMethod``.

    Attributes:
        gamma: share of the attention to be covered; the paper's 0.9 or 0.95.
        tau: largest distance at which the estimate is trusted; the paper's 0.1.
        least: tokens that each head takes at least, as columns and as diagonals.
        block: keys per block, 64 or 128.
        chunk: tokens per chunk.
        dense: chunks whose last row sees at most so many keys attend to all.
    """

    gamma: float = 0.9
    tau: float = 0.1
    least: int = 256
    block: int = 64
    chunk: int = 1024
    dense: int = 1024

    def __post_init__(self) -> None:
        for name in ("gamma", "tau"):
            require(0 <= getattr(self, name) <= 1, f"{name} must be from 0 to 1")
        require(self.least >= 1, "least must be at least 1")
        require(self.block in _BLOCKS, f"block must be 64 or 128, not {self.block}")
        require(self.chunk % self.block == 0, "chunk must be a multiple of block")
        ChunkRule(self.chunk, self.dense)

    @property
    def variant(self) -> str:
        """See ``PrefillMethod``."""
        return repr(self)

    @property
    def chunk_tokens(self) -> int:
        """See ``PrefillMethod``."""
        return self.chunk

    def is_dense(self, first: int, rows: int) -> bool:
        """See ``PrefillMethod``; what the least budget covers is dense, too."""
        covered = first + rows <= max(2, self._least_blocks) * self.block
        return covered or ChunkRule(self.chunk, self.dense).is_dense(first, rows)

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        pairs = choose_pairs(probe, self)
        return block_lists(pairs, self.block, probe.first, probe.rows)

    @property
    def _least_blocks(self) -> int:
        return -(-self.least // self.block)


def choose_pairs(probe: LayerProbe, method: FlexPrefill) -> BoolArray:
    """Return which blocks of keys each query block attends to: [query blocks, heads, key blocks].

    Args:
        probe: the layer; its first row's position is a multiple of the block.
        method: the hyper-parameters.
    """
    size, keys = method.block, probe.first + probe.rows
    blocks = -(-keys // size)
    own = (probe.first + np.arange(query_blocks(probe.rows)) * QUERY_BLOCK) // size
    if method.gamma == 1:  # all of it, whatever rounding makes of the sums
        return np.repeat((np.arange(blocks) <= own[:, None])[:, None], probe.query_heads, axis=1)
    rows = min(PROBED_ROWS, probe.rows)
    columns, diagonals = (mass / np.float32(rows) for mass in probe.masses(rows))
    least = min(-(-method.least // size), blocks)
    vertical, slash = _by_block(columns, size), _by_block(diagonals, size)
    means = probe.mean_keys(size).repeat(probe.query_heads // probe.kv_heads, axis=0)
    trusted = _trusted(probe, means, vertical, rows, method.tau)
    counts = [
        np.where(trusted, least, np.clip(covering(each, method.gamma) // size + 1, least, blocks))
        for each in (columns, diagonals)
    ]
    pairs = cross_pairs(largest(vertical, counts[0]), largest(slash, counts[1]), own)
    if trusted.any():
        heads = np.flatnonzero(trusted)
        pairs[:, heads] |= _best_pairs(probe, means[heads], heads, own, size, method.gamma)
    return pairs


def covering(weights: Float32Array, gamma: float) -> Int64Array:
    """Return how many of each row's largest weights it takes to exceed a share: [rows].

    Args:
        weights: [rows, n], each row adding up to 1.
        gamma: the share.
    """
    descending = -np.sort(-weights, axis=1)
    within = np.cumsum(descending, axis=1, dtype=np.float64) <= gamma
    needed: Int64Array = np.count_nonzero(within, axis=1) + 1
    return np.minimum(needed, weights.shape[1])


def divergence(p: Float32Array, q: Float32Array) -> Float32Array:
    """Return the square root of the Jensen-Shannon divergence of distributions, row by row.

    Args:
        p, q: [rows, n].
    """
    middle = (p + q) / 2
    total = np.zeros(len(p), np.float64)
    for each in (p, q):
        # 0 ln 0 is 0; where one is above 0, so is the middle.
        ratio = np.divide(each, middle, out=np.ones_like(middle), where=each > 0)
        total += (each * np.log(ratio)).sum(axis=1, dtype=np.float64) / 2
    return np.sqrt(np.maximum(total, 0)).astype(np.float32)


def cross_pairs(columns: BoolArray, diagonals: BoolArray, own: Int64Array) -> BoolArray:
    """Return the pairs of blocks on columns and diagonals of blocks, none after the row's own.

    The first column and the diagonal itself are always among them.

    Args:
        columns, diagonals: [heads, blocks].
        own: [query blocks], the block of keys that each query block is in.

    Returns:
        [query blocks, heads, blocks].
    """
    blocks = columns.shape[1]
    distance = own[:, None] - np.arange(blocks)
    reached = diagonals[:, np.maximum(distance, 0)].transpose(1, 0, 2)
    pairs = (reached | columns) & (distance >= 0)[:, None]
    pairs[:, :, 0] = True
    pairs[np.arange(len(own)), :, own] = True
    return pairs


def _by_block(mass: Float32Array, size: int) -> Float32Array:
    """Return the sums over blocks of [heads, n]: [heads, blocks]."""
    sums: Float32Array = np.add.reduceat(mass, np.arange(0, mass.shape[1], size), axis=1)
    return sums


def _trusted(
    probe: LayerProbe, means: Float32Array, vertical: Float32Array, rows: int, tau: float
) -> BoolArray:
    """Return which heads' attention mean queries and keys estimate well: [heads]."""
    query = probe.last_queries(rows).mean(axis=0)
    scores = np.einsum("hd,hkd->hk", query, means) * np.float32(probe.scale)
    near: BoolArray = divergence(_softmax(scores), vertical) < tau
    return near


def _best_pairs(
    probe: LayerProbe,
    means: Float32Array,
    heads: Int64Array,
    own: Int64Array,
    size: int,
    gamma: float,
) -> BoolArray:
    """Return the best pairs of blocks of some heads, over all rows together.

    Args:
        probe: the layer.
        means: [heads, blocks, head_dim], mean keys.
        heads: which query heads.
        own: [query blocks], the block of keys that each query block is in.
        size: keys per block.
        gamma: share of the estimated attention to be covered.

    Returns:
        [query blocks, heads, blocks].
    """
    queries = probe.mean_queries(size)[heads]
    scores = np.einsum("hqd,hkd->hqk", queries, means) * np.float32(probe.scale)
    rows = np.unique(own)
    scores[np.broadcast_to(np.arange(scores.shape[2]) > rows[:, None], scores.shape)] = -np.inf
    weights = _softmax(scores).reshape(len(heads), -1)
    counts = np.count_nonzero(
        np.cumsum(-np.sort(-weights, axis=1), axis=1, dtype=np.float64) <= gamma * len(rows), axis=1
    )
    kept = largest(weights, np.maximum(counts, 1)).reshape(scores.shape) & (scores > -np.inf)
    pairs: BoolArray = kept[:, own - rows[0]].transpose(1, 0, 2)
    return pairs


def _softmax(scores: Float32Array) -> Float32Array:
    """Return the softmax over the last dimension."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights: Float32Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return weights
