"""Products with codes equal NumPy's with what they stand for, queries and weights rounded."""

from typing import Any

import numpy as np
import pytest
from four_bit_entries import rounded_to_int8

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_cache import KVCache, KVCacheDtype
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.parts.block_bytes import BlockBytes, are_consecutive
from midfill.kernels.cpu.parts.quantized import (
    cut_quantized,
    load_nibbles,
    quantized_scratch_size,
)
from midfill.kernels.cpu.parts.quantized_products import score_codes, weigh_codes
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kv.quantized import (
    QuantizedBlock,
    QuantizedVectors,
    cell_arrays,
)
from midfill.kv.quantized_layout import STREAM_FIELDS

ROWS, CELLS = 5, 400
IN_ORDER = np.arange(SEGMENT, dtype=np.int32)
NO_LIMITS = np.zeros(0, np.int32)
PANEL = np.zeros(0, np.float32)


@kernel
def _score(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int,
    rows: SegmentRows, queries: Float32Array, order: Int32Array, panel: Float32Array,
    memory: Float32Array, scores: Float32Array,
) -> None:  # fmt: skip
    scratch = cut_quantized(memory, rows.head_dim)
    codes = load_nibbles(source, fields, tokens, first, count, rows.head_dim, scratch)
    span = KVSpan(codes.entries, codes.base, order, 0, count)
    score_codes(source.cache.keys, queries, fields, rows, span, span, panel, scratch, scores)


@kernel
def _weigh(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int,
    rows: SegmentRows, weights: Float32Array, order: Int32Array, panel: Float32Array,
    memory: Float32Array, sums: Float32Array,
) -> None:  # fmt: skip
    scratch = cut_quantized(memory, rows.head_dim)
    codes = load_nibbles(source, fields, tokens, first, count, rows.head_dim, scratch)
    span = KVSpan(codes.entries, codes.base, order, 0, count)
    weigh_codes(weights, fields, rows, span, span, panel, scratch, sums)


def vectors(count: int, dim: int, bits: int, terms: str) -> QuantizedVectors:
    """Random codes; ``terms`` names what they have: "t" per token, "s" and "z" per channel."""
    rng = np.random.default_rng([count, dim, bits, len(terms)])

    def halves(*shape: int) -> np.ndarray:
        return rng.normal(0, 1 / 2**bits, shape).astype(np.float16)

    return QuantizedVectors(
        rng.integers(0, 2**bits, (count, dim)).astype(np.uint8),
        bits,
        halves(count, 1, 2) if "t" in terms else None,
        halves(dim) if "s" in terms else None,
        halves(dim) if "z" in terms else None,
    )


def placed(one: QuantizedVectors, *, scattered: bool) -> tuple[BlockBytes, np.ndarray]:
    """A block whose keys they are, in a KV cache of float16, and its fields."""
    dim = one.codes.shape[1]
    cache = KVCache.allocate(KVCacheDtype.F16, CELLS, dim)
    block = QuantizedBlock.of(one, one)
    count = block.cells(4 * dim)
    cells = np.arange(7, 7 + count, dtype=np.int32)
    if scattered:
        cells = np.random.default_rng(count).permutation(CELLS)[:count].astype(np.int32)
    parts = cell_arrays([block], 4 * dim)
    for array, part in zip((cache.keys, cache.values), parts, strict=True):
        array.reshape(CELLS, dim)[cells] = np.ascontiguousarray(part).view(np.uint16)
    fields = np.array(block.fields[:STREAM_FIELDS], np.int32)
    return BlockBytes(cache, cells, count, 2 * dim, are_consecutive(cells, count)), fields


def shape(dim: int) -> SegmentRows:
    return SegmentRows(ROWS, 1, SEGMENT, 0, dim, NO_LIMITS, 0, 0)


def memory(dim: int) -> np.ndarray:
    return np.full(quantized_scratch_size(dim), np.nan, np.float32)


each_kind = pytest.mark.parametrize("terms", ["t", "s", "sz", "ts", "tz", "tsz"])
each_width = pytest.mark.parametrize("bits", [1, 2, 3, 4])
in_any_cells = pytest.mark.parametrize("scattered", [False, True])
each_part = pytest.mark.parametrize(
    ("dim", "tokens", "first", "count"),
    [(64, 300, 20, 256), (64, 70, 0, 70), (64, 1, 0, 1), (32, 100, 3, 50), (96, 100, 64, 36)],
)


def part_terms(one: QuantizedVectors, part: slice) -> tuple[Any, Any, Any, Any]:
    """Scales and zeros of tokens [n, 1], and of channels [dim], as float64."""
    count, dim = one.codes[part].shape
    terms = one.token_terms
    tokens = (np.ones((count, 1)), np.zeros((count, 1)))
    if terms is not None:
        tokens = (terms[part, :, 0].astype(float), terms[part, :, 1].astype(float))
    scale = np.ones(dim) if one.channel_scale is None else one.channel_scale.astype(float)
    zero = np.zeros(dim) if one.channel_zero is None else one.channel_zero.astype(float)
    return *tokens, scale, zero


@in_any_cells
@each_kind
@each_width
@each_part
def test_scores(
    terms: str, bits: int, dim: int, tokens: int, first: int, count: int, scattered: bool
) -> None:
    one, part = vectors(tokens, dim, bits, terms), slice(first, first + count)
    queries = np.random.default_rng(1).normal(size=(ROWS, dim)).astype(np.float32)
    scores = np.full(ROWS * SEGMENT, np.nan, np.float32)
    _score(
        *placed(one, scattered=scattered), tokens, first, count, shape(dim),
        queries.reshape(-1).copy(), IN_ORDER, PANEL, memory(dim), scores,
    )  # fmt: skip
    found = scores.reshape(ROWS, SEGMENT)[:, :count]
    scale, zero, channel_scale, channel_zero = part_terms(one, part)
    scaled = queries * channel_scale
    middle = 1 << (bits - 1)
    codes = one.codes[part].astype(float) - middle
    products = rounded_to_int8(scaled.astype(np.float32)) @ codes.T
    totals = scaled.sum(axis=1, keepdims=True)
    expected = scale.T * (products + middle * totals) + zero.T * totals
    expected += (queries @ channel_zero)[:, None]
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max() + 1e-6, rtol=0)
    exact = queries @ one.decode()[part].T
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max() + 0.02


@in_any_cells
@each_kind
@each_width
@each_part
def test_weighted_sums(
    terms: str, bits: int, dim: int, tokens: int, first: int, count: int, scattered: bool
) -> None:
    one, part = vectors(tokens, dim, bits, terms), slice(first, first + count)
    weights = np.zeros((ROWS, SEGMENT), np.float32)
    weights[:, :count] = np.random.default_rng(2).random((ROWS, count))
    sums = np.full(ROWS * dim, np.nan, np.float32)
    _weigh(
        *placed(one, scattered=scattered), tokens, first, count, shape(dim),
        weights.reshape(-1).copy(), IN_ORDER, PANEL, memory(dim), sums,
    )  # fmt: skip
    scale, zero, channel_scale, channel_zero = part_terms(one, part)
    seen = weights[:, :count].astype(float)
    scaled = (seen * scale.T).astype(np.float32)
    rounded = np.concatenate(
        [rounded_to_int8(scaled[:, at : at + 32]) for at in range(0, count, 32)], axis=1
    )
    middle = 1 << (bits - 1)
    products = rounded @ (one.codes[part].astype(float) - middle)
    rest = (seen * zero.T).sum(axis=1) + middle * scaled.sum(axis=1)
    expected = (products + rest[:, None]) * channel_scale
    expected += seen.sum(axis=1)[:, None] * channel_zero
    found = sums.reshape(ROWS, dim)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max() + 1e-6, rtol=0)
    exact = seen @ one.decode()[part]
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max() + 0.02
