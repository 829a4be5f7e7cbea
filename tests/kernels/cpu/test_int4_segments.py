"""Integer products of 4-bit entries equal NumPy's; a row has the same bits among any others."""

import numpy as np
import pytest
from four_bit_entries import hadamard_matrix, rounded_to_int8, unpacked

from midfill.kernels.cpu.int4_products import UNIT
from midfill.kernels.cpu.int4_segments import (
    quantize_queries,
    score_int4_segment,
    weigh_int4_segment,
)
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_cache import KVArray, KVCacheDtype, allocate_kv, write_entry
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kernels.cpu.simd import LANES

SLOTS = 400
ALL = 10**6
"""A limit beyond every key."""
IN_ORDER = np.zeros(0, np.int32)
NO_PANEL = np.zeros(0, np.float32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stored(dim: int, length: int) -> tuple[KVSpan, np.ndarray]:
    """A span of scattered slots, and the quants that it holds: [length, dim]."""
    entries, scales = allocate_kv(KVCacheDtype.I4, SLOTS, dim)
    values = normal(SLOTS, dim)
    for slot in range(SLOTS):
        write_entry(values[slot].copy(), 0, dim, entries, scales, slot)
    slots = np.random.default_rng(length).permutation(SLOTS).astype(np.int32)
    quants = unpacked(entries).reshape(SLOTS, dim)[slots[3 : 3 + length]]
    return KVSpan(entries, 0, slots, 3, length), quants.astype(np.float64)


@kernel
def _score(
    entries: KVArray, queries: Float32Array, rows: SegmentRows, keys: KVSpan, panel: Float32Array,
    scores: Float32Array,
) -> None:  # fmt: skip
    quantize_queries(entries, queries, rows.total, rows.head_dim)
    score_int4_segment(queries, rows, keys, keys, panel, scores)


def score(queries: np.ndarray, keys: KVSpan, group: int = 1, limit: int = ALL) -> np.ndarray:
    """[rows, keys]."""
    rows, dim = queries.shape
    scores = np.full(rows * SEGMENT, np.nan, np.float32)
    seen = SegmentRows(rows, group, limit, 0, dim, IN_ORDER, 0, 0)
    _score(keys.entries, queries.copy().reshape(-1), seen, keys, NO_PANEL, scores)
    return scores.reshape(rows, SEGMENT)[:, : keys.length]


def weigh(
    weights: np.ndarray, values: KVSpan, dim: int, group: int = 1, limit: int = ALL,
    window: int = 0,
) -> np.ndarray:  # fmt: skip
    """[rows, dim]."""
    rows = len(weights)
    padded = np.full((rows, SEGMENT), np.nan, np.float32)
    padded[:, : -(-values.length // LANES) * LANES] = 0.0  # as the softmax leaves them
    padded[:, : values.length] = weights
    sums = np.full(rows * dim, np.nan, np.float32)
    seen = SegmentRows(rows, group, limit, window, dim, IN_ORDER, 0, 0)
    weigh_int4_segment(padded.reshape(-1), seen, values, values, NO_PANEL, sums, 0)
    return sums.reshape(rows, dim)


def rounded_queries(queries: np.ndarray) -> np.ndarray:
    """Queries of the transform, as rounded."""
    block = queries.shape[1] & -queries.shape[1]
    transform = np.kron(np.eye(queries.shape[1] // block), hadamard_matrix(block))
    return rounded_to_int8(queries @ transform)


def rounded_weights(weights: np.ndarray) -> np.ndarray:
    padded = np.zeros((len(weights), SEGMENT))
    padded[:, : weights.shape[1]] = weights
    rounded = rounded_to_int8(padded.reshape(len(weights), -1, UNIT))
    return rounded.reshape(len(weights), SEGMENT)[:, : weights.shape[1]]


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("length", [1, 15, 33, 100, 256])
def test_scores_are_products_of_rounded_queries_with_keys(dim: int, length: int) -> None:
    keys, quants = stored(dim, length)
    queries = normal(31, dim, seed=1)
    got, exact = score(queries, keys), rounded_queries(queries) @ quants.T
    # But for a query at the edge between two quants.
    assert np.isclose(got, exact, rtol=1e-4, atol=1e-3).mean() > 0.99
    np.testing.assert_allclose(got, exact, atol=0.2)


@pytest.mark.parametrize("dim", [32, 64, 96, 256])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 190, 256])
def test_sums_are_of_rounded_weights_times_values(dim: int, length: int) -> None:
    values, quants = stored(dim, length)
    # Scales of values may be negative, and so may the weights that were multiplied by them.
    weights = np.exp(3 * normal(14, length, seed=5)) * np.sign(normal(length, seed=6))
    got, exact = weigh(weights.astype(np.float32), values, dim), rounded_weights(weights) @ quants
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4 * np.abs(weights).max())


@pytest.mark.parametrize("dim", [64, 256])
def test_the_largest_products_fit_their_sums(dim: int) -> None:
    """Where every quant is -8 or 7, and every weight and number of a query the largest there is."""
    entries, _ = allocate_kv(KVCacheDtype.I4, SEGMENT, dim)
    entries[:] = np.where(np.arange(len(entries)) % dim < dim // 2, 0x00, 0xFF)
    slots = np.arange(SEGMENT, dtype=np.int32)
    span = KVSpan(entries, 0, slots, 0, SEGMENT)
    quants = unpacked(entries).reshape(SEGMENT, dim)
    assert set(quants[0]) == {-8}
    assert set(quants[1]) == {7}
    ones = np.ones((2, SEGMENT), np.float32)
    ones[1] = -1.0
    np.testing.assert_allclose(weigh(ones, span, dim), ones @ quants, rtol=1e-6)
    query = np.zeros((2, dim), np.float32)
    query[:, 0] = (1.0, -1.0)  # whose transform is constant
    np.testing.assert_allclose(score(query, span), rounded_queries(query) @ quants.T, rtol=1e-6)


@pytest.mark.parametrize("rows", range(1, 15))
def test_any_number_of_rows_has_the_same_scores_and_sums(rows: int) -> None:
    span, _ = stored(64, 101)
    queries, weights = normal(14, 64, seed=2), normal(14, 101, seed=3)
    np.testing.assert_array_equal(score(queries[:rows], span), score(queries, span)[:rows])
    some, all_rows = weigh(weights[:rows], span, 64), weigh(weights, span, 64)
    np.testing.assert_array_equal(some, all_rows[:rows])


@pytest.mark.parametrize("limit", [-5, 1, 16, 40])
def test_scores_are_computed_wherever_a_row_sees_a_key(limit: int) -> None:
    keys, _ = stored(64, 200)
    queries = normal(90, 64, seed=4)
    whole, cut = score(queries, keys), score(queries, keys, 3, limit)
    for row in range(90):
        end = max(0, limit + row // 3)
        np.testing.assert_array_equal(cut[row, :end], whole[row, :end])


@pytest.mark.parametrize("rows", [3, 14])
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("limit", [-3, 1, 50, 170, ALL])
def test_sums_are_of_the_values_that_a_row_sees(rows: int, window: int, limit: int) -> None:
    values, _ = stored(64, 190)
    ends, keys = limit + np.arange(rows)[:, None] // 2, np.arange(190)
    seen = (keys < ends) & ((keys >= ends - window) if window else True)
    weights = np.where(seen, normal(rows, 190, seed=5), np.float32(0.0))
    got = weigh(weights, values, 64, 2, limit, window)
    np.testing.assert_array_equal(got, weigh(weights, values, 64))


def test_queries_and_weights_of_zeros_give_zeros() -> None:
    span, _ = stored(64, 40)
    np.testing.assert_array_equal(score(np.zeros((3, 64), np.float32), span), 0.0)
    np.testing.assert_array_equal(weigh(np.zeros((3, 40), np.float32), span, 64), 0.0)
