"""NaiveProbe: what a lister may look at, computed in NumPy as the definitions say."""

import numpy as np
from naive_tree_search import naive_choice

from midfill.arrays import Float32Array, Int32Array
from midfill.runners.forward.attention import QUERY_BLOCK
from midfill.runners.forward.tree_search import TreeRule


class NaiveProbe:
    """Implements ``runners.forward.attention.LayerProbe``.

    Args:
        layer: which one.
        queries: [rows, query_heads, head_dim], rotated.
        keys: [keys, kv_heads, head_dim], those of the rows last.
        scale: factor of q.k.
    """

    def __init__(self, layer: int, queries: np.ndarray, keys: np.ndarray, scale: float) -> None:
        self.layer, self.scale = layer, scale
        self.rows, self.query_heads = queries.shape[:2]
        self.first, self.kv_heads = len(keys) - self.rows, keys.shape[1]
        self._queries, self._keys = queries.astype(np.float32), keys.astype(np.float32)

    def masses(self, rows: int) -> tuple[Float32Array, Float32Array]:
        count = len(self._keys)
        keys = self._keys.repeat(self.query_heads // self.kv_heads, axis=1)
        queries = self._queries[self.rows - rows :]
        scores = np.einsum("qhd,khd->hqk", queries, keys) * np.float32(self.scale)
        seen = np.tri(rows, count, count - rows, dtype=bool)
        weights = softmax(np.where(seen, scores, np.float32(-np.inf)), -1)
        diagonals = np.zeros((self.query_heads, count), np.float32)
        for row in range(rows):
            end = count - rows + row + 1
            diagonals[:, :end] += weights[:, row, :end][:, ::-1]
        return weights.sum(axis=1), diagonals

    def last_queries(self, rows: int) -> Float32Array:
        return self._queries[self.rows - rows :]

    def mean_queries(self, block: int) -> Float32Array:
        return _block_means(self._queries, block)

    def mean_keys(self, block: int) -> Float32Array:
        return _block_means(self._keys, block)

    def search(self, rule: TreeRule, stride: int) -> Int32Array:
        group, chosen = self.query_heads // self.kv_heads, []
        for start in range(0, self.rows, QUERY_BLOCK):
            keys = self._keys[: self.first + start + 1]
            rows = self._queries[start : start + QUERY_BLOCK : stride]
            chosen.append(
                [
                    naive_choice(rows[:, head], keys[:, head // group], rule)
                    for head in range(self.query_heads)
                ]
            )
        return np.array(chosen, np.int32)


def _block_means(vectors: Float32Array, block: int) -> Float32Array:
    """Return the means of blocks of [n, heads, head_dim]: [heads, blocks, head_dim]."""
    starts = range(0, len(vectors), block)
    return np.stack([vectors[start : start + block].mean(axis=0) for start in starts], axis=1)


def softmax(scores: np.ndarray, axis: int) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)
