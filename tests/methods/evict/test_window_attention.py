"""Attention of observed queries against one row at a time, and the scores made of it."""

import dataclasses

import numpy as np
from fake_keys import GROUP, KV_HEADS, LAYERS, fake_keys, fake_queries, naive_attention

from midfill.methods.evict.window_attention import (
    average_pool,
    group_mean,
    head_attention,
    max_pool,
    received_attention,
    top_keys,
    window_attention,
)


def test_rows_see_the_keys_up_to_their_own() -> None:
    keys, store = fake_keys(30)
    queries = fake_queries(7)
    expected = naive_attention(store, queries, 30)
    for layer in range(LAYERS):
        found = window_attention(keys, queries, layer)
        np.testing.assert_allclose(found, expected[layer], atol=2e-6)


def test_rows_anywhere_see_the_keys_up_to_their_own() -> None:
    keys, store = fake_keys(30)
    queries = fake_queries(30)
    expected = naive_attention(store, queries, 30)
    for rows in ([3, 4, 17, 29], [0], []):
        own = np.array(rows, np.int32)
        for layer, kv_head in np.ndindex(LAYERS, KV_HEADS):
            found = head_attention(keys, queries[:, own], layer * KV_HEADS + kv_head, own)
            heads = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
            np.testing.assert_allclose(found, expected[layer, heads][:, own], atol=2e-6)


def test_pooling_counts_zeros_beyond_the_ends() -> None:
    pooled = average_pool(np.array([[1, 2, 3, 4]], np.float32), 3)
    np.testing.assert_allclose(pooled, [[1, 2, 3, 7 / 3]])


def test_the_largest_neighbour_counts() -> None:
    pooled = max_pool(np.array([[3, 1, 1, 1, 2]], np.float32), 3)
    assert pooled.tolist() == [[3, 3, 1, 2, 2]]


def test_query_heads_of_a_kv_head_vote_together() -> None:
    votes = np.arange(KV_HEADS * 2 * 5, dtype=np.float32).reshape(KV_HEADS * 2, 5)
    np.testing.assert_allclose(group_mean(votes, KV_HEADS)[1], (votes[2] + votes[3]) / 2)


def test_the_first_of_equal_scores_wins() -> None:
    assert top_keys(np.array([1, 5, 5, 0, 5], np.float32), 2).tolist() == [1, 2]


def test_what_a_key_receives_is_the_sum_over_rows() -> None:
    keys, store = fake_keys(30)
    queries = fake_queries(7)
    weights = naive_attention(store, queries, 30)
    for layer, kv_head in np.ndindex(LAYERS, KV_HEADS):
        own = weights[layer, kv_head * GROUP : (kv_head + 1) * GROUP]
        received = received_attention(keys, queries, layer * KV_HEADS + kv_head)
        np.testing.assert_allclose(received, own.sum(axis=(0, 1)), atol=1e-5)


def test_keys_outside_of_a_sliding_window_get_nothing() -> None:
    keys, _ = fake_keys(30)
    keys.config = dataclasses.replace(keys.config, sliding_window=5)
    weights = head_attention(keys, fake_queries(7), 0)
    row, key = np.arange(23, 30)[:, None], np.arange(30)
    assert (weights[:, (key > row) | (key <= row - 5)] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
