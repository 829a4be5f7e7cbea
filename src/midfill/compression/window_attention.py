"""Attention of observed queries over a prompt's keys, and what scores are made of it.

Computed outside the forward pass, in float32, one layer at a time. Many methods look at the same
thing: what the last rows of a prompt (the observation window) attend to.
"""

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.compression.method import SequenceKeys


def window_attention(keys: SequenceKeys, queries: Float32Array, layer: int) -> Float32Array:
    """Return the attention weights of a prompt's last rows.

    Args:
        keys: of the prompt; all heads hold all n keys.
        queries: float32 [layers, rows, query_heads, head_dim], rotated: of the last rows.
        layer: which one.

    Returns:
        float32 [query_heads, rows, n]; a row sees the keys up to its own, within the layer's
        sliding window if it has one.
    """
    first = layer * keys.config.kv_heads
    heads = range(first, first + keys.config.kv_heads)
    return np.concatenate([head_attention(keys, queries, head) for head in heads])


def head_attention(keys: SequenceKeys, queries: Float32Array, head: int) -> Float32Array:
    """Return the attention weights of a sequence's last rows in one head.

    Args:
        keys: of the sequence; the rows' own are the last ones.
        queries: float32 [layers, rows, query_heads, head_dim], rotated: of the last rows.
        head: KV head ``layer * kv_heads + head``.

    Returns:
        float32 [query heads of the KV head, rows, n]; see ``window_attention``.
    """
    config = keys.config
    group = config.query_heads // config.kv_heads
    layer, kv_head = divmod(head, config.kv_heads)
    found, _ = keys.read(head)
    own = queries[layer, :, kv_head * group : (kv_head + 1) * group]
    scores = np.einsum("rgd,kd->grk", own, found, optimize=True) * config.score_scale
    return _causal_softmax(scores, queries.shape[1], config.window_of(layer))


def _causal_softmax(scores: Float32Array, rows: int, window: int | None) -> Float32Array:
    """Normalise scores [heads, rows, n] over the keys that each row sees."""
    count = scores.shape[-1]
    row = np.arange(count - rows, count)[:, None]
    key = np.arange(count)
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    masked = np.where(hidden, np.float32(-np.inf), scores)
    powers = np.exp(masked - masked.max(axis=-1, keepdims=True))
    normalized: Float32Array = powers / powers.sum(axis=-1, keepdims=True)
    return normalized


def average_pool(scores: Float32Array, kernel: int) -> Float32Array:
    """Return the mean of each score [..., n] and its neighbours: ``kernel`` in all, an odd number.

    Beyond the ends there are zeros, which count.
    """
    side = kernel // 2
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(side, side)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    pooled: Float32Array = windows.mean(axis=-1, dtype=np.float32)
    return pooled


def group_mean(scores: Float32Array, kv_heads: int) -> Float32Array:
    """Return the mean over the query heads of each KV head: [query_heads, n] to [kv_heads, n]."""
    grouped = scores.reshape(kv_heads, -1, scores.shape[-1])
    mean: Float32Array = grouped.mean(axis=1, dtype=np.float32)
    return mean


def top_keys(scores: Float32Array, count: int) -> Int32Array:
    """Return the ``count`` keys with the highest of the scores [n]; of equal ones the first."""
    return np.argsort(-scores, kind="stable")[:count].astype(np.int32)
