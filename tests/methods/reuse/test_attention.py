"""Attention weights of single rows, against loops over heads and keys."""

from dataclasses import replace

import numpy as np
import pytest

from midfill.methods.reuse.attention import block_sums, head_weights
from midfill.models.config import ModelConfig

CONFIG = ModelConfig(
    family="llama", layers=2, hidden=16, query_heads=4, kv_heads=2, head_dim=4, ffn=8, vocab=10,
    context=100,
)  # fmt: skip


@pytest.mark.parametrize("window", [None, 3])
def test_weights_are_those_of_a_loop(window: int | None) -> None:
    config = replace(CONFIG, sliding_window=window)
    chance = np.random.default_rng(0)
    queries = chance.normal(size=(3, 4, 4)).astype(np.float32)
    keys = chance.normal(size=(9, 2, 4)).astype(np.float32)
    rows = np.array([2, 5, 8])
    expected = np.zeros((3, 9))
    for place, row in enumerate(rows.tolist()):
        for head in range(4):
            seen = [key for key in range(row + 1) if window is None or key > row - window]
            scores = [np.exp(queries[place, head] @ keys[key, head // 2] / 2) for key in seen]
            for key, score in zip(seen, scores, strict=True):
                expected[place, key] += score / sum(scores) / 4
    found = head_weights(config, 0, queries, keys, rows)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_blocks_add_up_to_the_explicit_matrix() -> None:
    weights = np.random.default_rng(1).random((4, 10)).astype(np.float32)
    sums = block_sums(weights, (0, 1, 7, 10, 12))
    expected = [[row[0], row[1:7].sum(), row[7:10].sum(), 0.0] for row in weights]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
