"""Attention of some rows of a layer, computed beside the forward pass."""

from collections.abc import Sequence

import numpy as np

from midfill.arrays import Float32Array, Int64Array
from midfill.models.config import ModelConfig


def head_weights(
    config: ModelConfig, layer: int, queries: Float32Array, keys: Float32Array, rows: Int64Array
) -> Float32Array:
    """Return the attention weights of some rows, on average over query heads.

    Args:
        config: the model.
        layer: which layer they are of.
        queries: float32 [n, query_heads, head_dim], rotated.
        keys: float32 [m, kv_heads, head_dim], rotated: of the tokens 0 to m - 1.
        rows: [n] int64, the rows' numbers; a row sees the keys up to its own, within the layer's
            sliding window if it has one.

    Returns:
        float32 [n, m]; each row's sum is 1.
    """
    count, window = len(keys), config.window_of(layer)
    total: Float32Array = np.zeros((len(rows), count), np.float32)
    group = config.query_heads // config.kv_heads
    number = np.arange(count)
    hidden = number > rows[:, None]
    if window is not None:
        hidden |= number <= rows[:, None] - window
    for head in range(config.query_heads):
        scaled = queries[:, head] * np.float32(config.score_scale)
        scores = scaled @ keys[:, head // group].T
        scores[hidden] = -np.inf
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        total += scores
    total /= np.float32(config.query_heads)
    return total


def block_sums(weights: Float32Array, bounds: Sequence[int]) -> Float32Array:
    """Return each row's sum of [n, m] weights over blocks of keys: [n, blocks] float32.

    Args:
        weights: of ``head_weights``.
        bounds: first key of each block, ascending, and the end of the last one; no block is empty.
            Blocks beyond the m keys have the sum 0.
    """
    sums: Float32Array = np.zeros((len(weights), len(bounds) - 1), np.float32)
    for block, start in enumerate(bounds[:-1]):
        sums[:, block] = weights[:, start : bounds[block + 1]].sum(axis=1)
    return sums
