"""Attention of observed queries over a prompt's keys, and what scores are made of it.

Computed outside the forward pass, in float32, one layer at a time. Many methods look at the same
thing: what the last rows of a prompt (the observation window) attend to.
"""

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.methods.evict.method import SequenceKeys

_ONE_THREAD = 2**18
"""Multiplications of a matrix product that OpenBLAS does without its threads. On busy cores, these
wait 10 to 30 ms for one that is not scheduled."""


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


def head_attention(
    keys: SequenceKeys, queries: Float32Array, head: int, rows: Int32Array | None = None
) -> Float32Array:
    """Return the attention weights of some of a sequence's rows in one head.

    Args:
        keys: of the sequence.
        queries: float32 [layers, rows, query_heads, head_dim], rotated.
        head: KV head ``layer * kv_heads + head``.
        rows: [rows] int32, ascending, the numbers of the rows' own keys among the n, see below;
            None: the rows are the last ones.

    Returns:
        float32 [query heads of the KV head, rows, n]; see ``window_attention``. The first of the n
        keys are the quantised ones.
    """
    scaled, own_keys, window = _observed(keys, queries, head, rows)
    weights = query_key_products(scaled, found := keys.read_keys(head))
    row, count = own_keys[:, None], len(found)
    # All rows see the keys before the first row's, unless a window hides them.
    first = int(row.min(initial=count)) if window is None else 0
    key = np.arange(first, count)
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    weights[:, :, first:][:, hidden] = -np.inf
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def query_key_products(queries: Float32Array, keys: Float32Array) -> Float32Array:
    """Return the products of [heads, rows, head_dim] queries and [n, head_dim] keys."""
    products = np.empty((*queries.shape[:2], len(keys)), np.float32)
    step = max(_ONE_THREAD // max(queries.shape[1] * queries.shape[2], 1), 1)
    for start in range(0, len(keys), step):
        part = slice(start, start + step)
        np.matmul(queries, keys[part].T, out=products[:, :, part])
    return products


def received_attention(
    keys: SequenceKeys, queries: Float32Array, head: int, rows: Int32Array | None = None
) -> Float32Array:
    """Return the attention that each key receives from some of a sequence's rows in one head.

    Args:
        keys, queries, head, rows: see ``head_attention``.

    Returns:
        float32 [n]: the sum of ``head_attention`` over query heads and rows.
    """
    # Not above: servers read methods' parameters without the libraries that compute.
    from midfill.kernels.cpu.observation import received_attention as compiled

    scaled, own_keys, window = _observed(keys, queries, head, rows)
    return compiled.received_attention(scaled, keys.read_keys(head), own_keys, window)


def _observed(
    keys: SequenceKeys, queries: Float32Array, head: int, rows: Int32Array | None
) -> tuple[Float32Array, Int32Array, int | None]:
    """Return what a head's rows ask, which their own keys are, and how many keys they see.

    Args:
        keys, queries, head, rows: see ``head_attention``.

    Returns:
        float32 [query heads of the KV head, rows, head_dim], scaled; [rows] int32; None is all.
    """
    config = keys.config
    group = config.query_heads // config.kv_heads
    layer, kv_head = divmod(head, config.kv_heads)
    own = queries[layer, :, kv_head * group : (kv_head + 1) * group].transpose(1, 0, 2)
    scaled = np.multiply(own, np.float32(config.score_scale), order="C")
    if rows is None:
        count = int(keys.counts[head] + keys.quantized_counts[head])
        rows = np.arange(count - queries.shape[1], count, dtype=np.int32)
    return scaled, rows, config.window_of(layer)


def average_pool(scores: Float32Array, kernel: int) -> Float32Array:
    """Return the mean of each score [..., n] and its neighbours: ``kernel`` in all, an odd number.

    Beyond the ends there are zeros, which count.
    """
    neighbours = _neighbours(scores, kernel, np.float32(0.0))
    total = sum(neighbours[1:], start=neighbours[0])
    return total / np.float32(kernel)


def max_pool(scores: Float32Array, kernel: int) -> Float32Array:
    """Return the largest of each score [..., n] and its neighbours: ``kernel`` in all, odd."""
    largest: Float32Array = np.maximum.reduce(_neighbours(scores, kernel, np.float32(-np.inf)))
    return largest


def _neighbours(scores: Float32Array, kernel: int, beyond: np.float32) -> list[Float32Array]:
    """Return [..., n] scores moved by -kernel // 2 to kernel // 2; ``beyond`` lies at the ends."""
    sides = [(0, 0)] * (scores.ndim - 1) + [(kernel // 2, kernel // 2)]
    padded = np.pad(scores, sides, constant_values=beyond)
    return [padded[..., at : at + scores.shape[-1]] for at in range(kernel)]


def group_mean(scores: Float32Array, kv_heads: int) -> Float32Array:
    """Return the mean over the query heads of each KV head: [query_heads, n] to [kv_heads, n]."""
    grouped = scores.reshape(kv_heads, -1, scores.shape[-1])
    mean: Float32Array = grouped.mean(axis=1, dtype=np.float32)
    return mean


def top_keys(scores: Float32Array, count: int) -> Int32Array:
    """Return the ``count`` keys with the highest of the scores [n]; of equal ones the first."""
    return np.argsort(-scores, kind="stable")[:count].astype(np.int32)
