"""One segment of keys: scores have the same bits for any number of rows; sums equal NumPy's."""

import numpy as np
import pytest

from midfill.kernels.cpu.kv_cache import KVCacheDtype, allocate_kv, write_entry
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.segments import MAX_ROWS_IN_PLACE, score_segment, weigh_segment

SLOTS = 400
ALL = 10**6
"""A limit beyond every key."""
FORMATS = [KVCacheDtype.F32, KVCacheDtype.F16, KVCacheDtype.BF16, KVCacheDtype.I8]
"""Those whose products are float32, and bfloat16, which is read in the same way."""
IN_ORDER = np.zeros(0, np.int32)
"""Limits of rows that follow one another."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stored(kv_cache_dtype: KVCacheDtype, dim: int, length: int) -> tuple[KVSpan, np.ndarray]:
    """A span of scattered slots, and what it holds: [length, dim], quants without scale."""
    entries, scales = allocate_kv(kv_cache_dtype, SLOTS, dim)
    values = normal(SLOTS, dim)
    for slot in range(SLOTS):
        write_entry(values[slot].copy(), 0, dim, entries, scales, slot)
    slots = np.random.default_rng(length).permutation(SLOTS).astype(np.int32)
    read = entries.view(np.float16) if entries.dtype == np.uint16 else entries
    if entries.dtype == np.int16:
        read = (entries.astype(np.int32) << 16).view(np.float32)
    chosen = read.reshape(SLOTS, dim)[slots[3 : 3 + length]].astype(np.float64)
    return KVSpan(entries, 0, slots, 3, length), chosen


def score(queries: np.ndarray, keys: KVSpan, group: int = 1, limit: int = ALL) -> np.ndarray:
    """[rows, keys]."""
    rows, dim = queries.shape
    scores = np.full(rows * SEGMENT, np.nan, np.float32)
    panel = np.empty(dim * 16, np.float32)
    seen = SegmentRows(rows, group, limit, 0, dim, IN_ORDER, 0, 0)
    score_segment(queries.reshape(-1), seen, keys, keys, panel, scores)
    return scores.reshape(rows, SEGMENT)[:, : keys.length]


def weigh(
    weights: np.ndarray, values: KVSpan, dim: int, group: int = 1, limit: int = ALL,
    window: int = 0,
) -> np.ndarray:  # fmt: skip
    """[rows, dim]."""
    rows = len(weights)
    padded = np.full((rows, SEGMENT), np.nan, np.float32)
    padded[:, : values.length] = weights
    sums = np.full(rows * dim, np.nan, np.float32)
    seen = SegmentRows(rows, group, limit, window, dim, IN_ORDER, 0, 0)
    weigh_segment(padded.reshape(-1), seen, values, values, sums, 0)
    return sums.reshape(rows, dim)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("length", [1, 15, 16, 33, 256])
def test_transposed_keys_give_the_bits_that_keys_in_place_give(
    kv_cache_dtype: KVCacheDtype, dim: int, length: int
) -> None:
    keys, read = stored(kv_cache_dtype, dim, length)
    queries = normal(31, dim, seed=1)
    transposed = score(queries, keys)
    np.testing.assert_allclose(
        transposed, queries @ read.T, rtol=1e-5, atol=2e-4 * np.abs(read).max()
    )
    in_place = [score(queries[row : row + n], keys) for row, n in ((0, 4), (4, 3), (7, 2), (9, 1))]
    np.testing.assert_array_equal(np.concatenate(in_place), transposed[:10])
    np.testing.assert_array_equal(
        score(queries[10 : 10 + MAX_ROWS_IN_PLACE], keys), transposed[10:][:MAX_ROWS_IN_PLACE]
    )


@pytest.mark.parametrize("rows", range(MAX_ROWS_IN_PLACE + 1, MAX_ROWS_IN_PLACE + 12))
def test_any_number_of_rows_has_the_same_scores_and_sums(rows: int) -> None:
    span, read = stored(KVCacheDtype.F16, 64, 100)
    queries, weights = normal(rows, 64, seed=2), normal(rows, 100, seed=3)
    scores, sums = score(queries, span), weigh(weights, span, 64)
    np.testing.assert_allclose(sums, weights @ read, atol=1e-4)
    for row in range(rows):
        np.testing.assert_array_equal(score(queries[row : row + 1], span)[0], scores[row])
        np.testing.assert_array_equal(weigh(weights[row : row + 1], span, 64)[0], sums[row])


@pytest.mark.parametrize("limit", [-5, 1, 16, 40])
def test_scores_are_computed_wherever_a_row_sees_a_key(limit: int) -> None:
    keys, _ = stored(KVCacheDtype.F16, 64, 77)
    queries = normal(90, 64, seed=4)
    whole, cut = score(queries, keys), score(queries, keys, 3, limit)
    for row in range(90):
        end = max(0, limit + row // 3)
        np.testing.assert_array_equal(cut[row, :end], whole[row, :end])


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("dim", [32, 64, 96, 256])
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("limit", [-3, 1, 50, ALL])
def test_sums_are_of_the_values_that_a_row_sees(
    kv_cache_dtype: KVCacheDtype, dim: int, window: int, limit: int
) -> None:
    values, read = stored(kv_cache_dtype, dim, 90)
    ends = limit + np.arange(14)[:, None] // 2
    keys = np.arange(90)
    seen = (keys < ends) & ((keys >= ends - window) if window else True)
    weights = np.where(seen, normal(14, 90, seed=5), np.float32(0.0))
    got = weigh(weights, values, dim, 2, limit, window)
    np.testing.assert_allclose(got, weights @ read, rtol=1e-5, atol=2e-5 * np.abs(read).max())
