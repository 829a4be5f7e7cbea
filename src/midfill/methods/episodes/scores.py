"""What stays of a block: scores of cached keys, and how many keys each layer and head keeps."""

from collections.abc import Sequence

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import (
    max_pool,
    query_key_products,
    received_attention,
)

_KERNEL = 7


def cached_scores(keys: SequenceKeys, queries: Float32Array) -> list[Float32Array]:
    """Return the most attention that each cached key receives from rows that aren't cached.

    The rows' own keys don't count: a row's weights over the cached keys alone add up to 1. Of these
    weights, a key's score is the largest, over rows and over the query heads of its KV head. (With
    their own keys among them, heads whose rows look at each other would score low as a whole.)

    Args:
        keys: the cached ones; heads may hold different numbers of them, each at least one.
        queries: float32 [layers, rows, query_heads, head_dim], rotated.

    Returns:
        Of each head ``layer * kv_heads + head``, float32 [n].
    """
    config = keys.config
    group = config.query_heads // config.kv_heads
    scaled = queries * np.float32(config.score_scale)
    found = []
    for head in range(keys.heads):
        layer, kv_head = divmod(head, config.kv_heads)
        own = scaled[layer, :, kv_head * group : (kv_head + 1) * group].transpose(1, 0, 2)
        weights = query_key_products(np.ascontiguousarray(own), keys.read_keys(head))
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=-1, keepdims=True)
        found.append(weights.max(axis=(0, 1)))
    return found


def window_scores(keys: SequenceKeys, queries: Float32Array) -> list[Float32Array]:
    """Return what each key receives from a sequence's last rows, pooled over 7: SnapKV's score.

    Args:
        keys: heads may hold different numbers of them, those of the rows the last.
        queries: float32 [layers, rows, query_heads, head_dim], rotated.

    Returns:
        See ``cached_scores``.
    """
    received = (received_attention(keys, queries, head) for head in range(keys.heads))
    return [max_pool(each, _KERNEL) for each in received]


def best_keys(
    scores: Sequence[Float32Array], budgets: Int64Array, always: int, *, pooled: bool
) -> Selection:
    """Return which keys stay.

    Args:
        scores: of each head's keys; of equal ones, the first head's and the first key stay.
        budgets: [layers] int64, above ``always``: keys that a layer keeps per head, on average.
        always: so many of each head's first keys stay.
        pooled: whether the heads of a layer compete for keys; otherwise each keeps as many.
    """
    kv_heads = len(scores) // len(budgets)
    kept: list[Int32Array] = []
    for layer, budget in enumerate(budgets.tolist()):
        own = [each.copy() for each in scores[layer * kv_heads : (layer + 1) * kv_heads]]
        for each in own:
            each[:always] = np.inf
        if not pooled:
            kept += [_best(each, budget) for each in own]
            continue
        head = np.repeat(np.arange(kv_heads), [len(each) for each in own])
        number = np.concatenate([np.arange(len(each), dtype=np.int32) for each in own])
        best = _best(np.concatenate(own), budget * kv_heads)
        kept += [number[best[head[best] == each]] for each in range(kv_heads)]
    return Selection.of_heads(kept)


def every_key(keys: SequenceKeys) -> Selection:
    """Return the selection of everything."""
    return Selection.of_heads([np.arange(count, dtype=np.int32) for count in keys.counts])


def _best(scores: Float32Array, count: int) -> Int32Array:
    return np.argsort(-scores, kind="stable")[:count].astype(np.int32)


def layer_budgets(similarity: Float64Array, mean: int, alpha: float) -> Int64Array:
    """Return how many keys each layer keeps per head: [layers] int64, on average at most ``mean``.

    A layer whose keys are much the same when what stands far before is hidden is insensitive to
    eviction, and keeps fewer, but at least a quarter of the mean:

        n_l = (s_l - min s) / (max s - min s),  g_l = (1 - n_l)^alpha,
        M_l = max(M / 4, L * M * g_l / sum g)

    The quarter can push the sum above L * M; then what layers have above it shrinks. (The paper
    leaves that open.)

    Args:
        similarity: s [layers]; if all are equal, so are the budgets.
        mean: M, at least 1.
        alpha: sharpness, at least 0; 0 gives equal budgets.
    """
    low, high = float(similarity.min()), float(similarity.max())
    if alpha == 0 or high <= low:
        return np.full(len(similarity), mean, np.int64)
    weights = (1 - (similarity - low) / (high - low)) ** alpha
    least, total = -(-mean // 4), len(similarity) * mean
    above = np.maximum(np.floor(total * weights / weights.sum()) - least, 0)
    room = total - least * len(similarity)
    if above.sum() > room:
        above = np.floor(above * (room / above.sum()))
    budgets: Int64Array = least + above.astype(np.int64)
    return budgets
