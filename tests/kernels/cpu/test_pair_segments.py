"""Products of bfloat16 pairs: sums equal NumPy's; a row has the same bits among any others."""

import numpy as np
import pytest
import torch

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_cache import KVCacheDtype, allocate_kv, write_entry
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.pair_segments import (
    panel_words,
    power_of_two,
    round_queries,
    score_pairs,
    softmax_pairs,
    weigh_pairs,
)
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.simd import load, store

SLOTS = 400
ALL = 10**6
"""A limit beyond every key."""
IN_ORDER = np.zeros(0, np.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(numbers).bfloat16().float().numpy()


def stored(dim: int, length: int) -> tuple[KVSpan, np.ndarray]:
    """A span of scattered slots, and what it holds: [length, dim]."""
    entries, scales = allocate_kv(KVCacheDtype.BF16, SLOTS, dim)
    values = normal(SLOTS, dim)
    for slot in range(SLOTS):
        write_entry(values[slot], 0, dim, entries, scales, slot)
    slots = np.random.default_rng(length).permutation(SLOTS).astype(np.int32)
    return KVSpan(entries, 0, slots, 3, length), rounded(values)[slots[3 : 3 + length]]


def score(queries: np.ndarray, keys: KVSpan, group: int = 1, limit: int = ALL) -> np.ndarray:
    """[rows, keys]."""
    rows, dim = queries.shape
    words = queries.reshape(-1).copy()
    round_queries(words, rows * dim)
    scores = np.full(rows * SEGMENT, np.nan, np.float32)
    panel = np.full(panel_words(dim), np.nan, np.float32)
    score_pairs(
        words, SegmentRows(rows, group, limit, 0, dim, IN_ORDER, 0, 0), keys, keys, panel, scores
    )
    return scores.reshape(rows, SEGMENT)[:, : keys.length]


def attend(
    scores: np.ndarray, values: KVSpan, dim: int, group: int = 1, limit: int = ALL, window: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weights [rows, 256] as rounded, the states [rows, 2] and the sums [rows, dim]."""
    rows = len(scores)
    padded = np.full((rows, SEGMENT), np.nan, np.float32)
    padded[:, : values.length] = scores
    weights, states = padded.reshape(-1), np.empty(rows * 2, np.float32)
    shape = SegmentRows(rows, group, limit, window, dim, IN_ORDER, 0, 0)
    softmax_pairs(shape, values.length, weights, states, 0)
    sums = np.full(rows * dim, np.nan, np.float32)
    panel = np.full(panel_words(dim), np.nan, np.float32)
    weigh_pairs(weights, shape, values, values, panel, sums, 0)
    words = weights.reshape(rows, SEGMENT)[:, : SEGMENT // 2].copy().view(np.uint16)
    return (
        (words.astype(np.uint32) << 16).view(np.float32)[:, : values.length],
        states.reshape(rows, 2),
        sums.reshape(rows, dim),
    )


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("length", [1, 15, 33, 100, 256])
def test_scores_are_products_of_rounded_queries_with_keys(dim: int, length: int) -> None:
    keys, read = stored(dim, length)
    queries = normal(31, dim, seed=1)
    got = score(queries, keys)
    np.testing.assert_allclose(got, rounded(queries) @ read.T, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rows", range(1, 15))
def test_any_number_of_rows_has_the_same_scores_and_sums(rows: int) -> None:
    span, _ = stored(64, 101)
    queries, scores = normal(14, 64, seed=2), normal(14, 101, seed=3)
    np.testing.assert_array_equal(score(queries[:rows], span), score(queries, span)[:rows])
    some, all_rows = attend(scores[:rows], span, 64), attend(scores, span, 64)
    for got, whole in zip(some, all_rows, strict=True):
        np.testing.assert_array_equal(got, whole[:rows])


@pytest.mark.parametrize("limit", [-5, 1, 16, 40])
def test_scores_are_computed_wherever_a_row_sees_a_key(limit: int) -> None:
    keys, _ = stored(64, 200)
    queries = normal(90, 64, seed=4)
    whole, cut = score(queries, keys), score(queries, keys, 3, limit)
    for row in range(90):
        end = max(0, limit + row // 3)
        np.testing.assert_array_equal(cut[row, :end], whole[row, :end])


@pytest.mark.parametrize("rows", [3, 14])
@pytest.mark.parametrize("dim", [32, 64, 96, 256])
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("limit", [-3, 1, 50, 170, ALL])
def test_weights_are_of_the_keys_that_a_row_sees(
    rows: int, dim: int, window: int, limit: int
) -> None:
    values, read = stored(dim, 190)
    scores = normal(rows, 190, seed=5) * 3
    ends = limit + np.arange(rows)[:, None] // 2
    seen = (np.arange(190) < ends) & ((np.arange(190) >= ends - window) if window else True)
    weights, states, sums = attend(scores, values, dim, 2, limit, window)
    maxima = np.where(seen, scores, -np.inf).max(axis=1)
    np.testing.assert_array_equal(states[:, 0], maxima)
    shift = np.where(np.isfinite(maxima), maxima, 0)[:, None]
    exact = np.where(seen, np.exp(scores - shift), 0)
    np.testing.assert_array_equal(weights[~seen], 0)
    np.testing.assert_allclose(weights, exact, rtol=1 / 256, atol=1e-30)
    # The sums are of the rounded weights, which is what they are divided by.
    np.testing.assert_allclose(states[:, 1], weights.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(sums, weights @ read, rtol=1e-4, atol=1e-4)


@kernel
def _powers(x, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        store(out, i, power_of_two(load(x, i)))


def test_powers_of_two_are_as_exact_as_weights_need() -> None:
    x = np.linspace(-126, 0, 160_000, dtype=np.float32)
    out = np.empty_like(x)
    _powers(x, out)
    np.testing.assert_allclose(out, np.exp2(x.astype(np.float64)), rtol=1.1e-4)
    assert out[-1] == 1
    unseen = np.array([-np.inf, -127, -1e30] + [0.0] * 13, np.float32)
    _powers(unseen, out[:16])
    np.testing.assert_array_equal(out[:3], 0)
