"""Products with codes equal NumPy's with what they stand for, queries and weights rounded."""

from dataclasses import replace

import numpy as np
import pytest
from four_bit_entries import rounded_to_int8
from quantized_cells import placed

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.parts.block_bytes import BlockBytes
from midfill.kernels.cpu.parts.quantized import (
    cut_quantized,
    load_nibbles,
    quantized_scratch_size,
)
from midfill.kernels.cpu.parts.quantized_products import (
    correct_scores,
    correct_sums,
    groups_of,
    has_corrections,
    has_plain_codes,
    number_groups,
    score_codes,
    weigh_codes,
)
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
from midfill.kv.quantized import (
    QuantizedBlock,
    QuantizedVectors,
)
from midfill.kv.quantized_layout import STREAM_FIELDS

ROWS = 5
NUMBERS = np.zeros(SEGMENT, np.int32)
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
    number_groups(order, count, groups_of(fields))
    span = KVSpan(codes.entries, codes.base, order, 0, count)
    score_codes(source.cache.keys, queries, fields, rows, span, span, panel, scratch, scores)
    if has_corrections(fields):
        correct_scores(
            source.cache.keys, source, fields, tokens, first, count, queries, rows, scratch, scores
        )


@kernel
def _weigh(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int,
    rows: SegmentRows, weights: Float32Array, order: Int32Array, panel: Float32Array,
    memory: Float32Array, sums: Float32Array,
) -> None:  # fmt: skip
    scratch = cut_quantized(memory, rows.head_dim)
    codes = load_nibbles(source, fields, tokens, first, count, rows.head_dim, scratch)
    number_groups(order, count, groups_of(fields))
    span = KVSpan(codes.entries, codes.base, order, 0, count)
    weigh_codes(weights, fields, rows, span, span, panel, scratch, sums)
    if has_corrections(fields):
        correct_sums(source, fields, tokens, first, count, weights, rows, scratch, sums)


def vectors(count: int, dim: int, bits: int, terms: str) -> QuantizedVectors:
    """Random codes; ``terms`` names what they have.

    "t" is terms per token, "g" per token and group, "s" and "z" per channel, "r" a low rank, "o"
    outliers.
    """
    rng = np.random.default_rng([count, dim, bits, len(terms)])
    groups = 2 if "g" in terms and dim % 64 == 0 else 1
    places = np.sort(rng.choice(count * dim, count * dim // 20, replace=False))

    def halves(*shape: int) -> np.ndarray:
        return rng.normal(0, 1 / 2**bits, shape).astype(np.float16)

    return QuantizedVectors(
        rng.integers(0, 2**bits, (count, dim)).astype(np.uint8),
        bits,
        halves(count, groups, 2) if "t" in terms or "g" in terms else None,
        halves(dim) if "s" in terms else None,
        halves(dim) if "z" in terms else None,
        halves(count, 3) if "r" in terms else None,
        halves(3, dim) if "r" in terms else None,
        places.astype(np.uint16) if "o" in terms else None,
        halves(len(places)) if "o" in terms else None,
    )


def shape(dim: int) -> SegmentRows:
    return SegmentRows(ROWS, 1, SEGMENT, 0, dim, NO_LIMITS, 0, 0)


def memory(dim: int) -> np.ndarray:
    return np.full(quantized_scratch_size(dim), np.nan, np.float32)


each_kind = pytest.mark.parametrize(
    "terms", ["t", "s", "sz", "tz", "tsz", "g", "gs", "tro", "gszro"]
)
each_width = pytest.mark.parametrize("bits", [1, 2, 3, 4])
in_any_cells = pytest.mark.parametrize("scattered", [False, True])
each_part = pytest.mark.parametrize(
    ("dim", "tokens", "first", "count"),
    [(64, 300, 20, 256), (64, 70, 0, 70), (64, 1, 0, 1), (32, 100, 3, 50), (96, 100, 64, 36)],
)


class Terms:
    """A stream's terms, as float64, with those of tokens for each channel, and its codes."""

    def __init__(self, one: QuantizedVectors, part: slice) -> None:
        count, dim = one.codes[part].shape
        self.middle = 1 << (one.bits - 1)
        self.codes = one.codes[part].astype(float) - self.middle
        terms = one.token_terms
        tokens = np.ones((count, 1, 2)) * (1, 0) if terms is None else terms[part].astype(float)
        self.groups = tokens.shape[1]
        self.scale, self.zero = tokens[..., 0], tokens[..., 1]
        self.channel_scale, self.channel_zero = (
            np.full(dim, neutral) if each is None else each.astype(float)
            for each, neutral in ((one.channel_scale, 1.0), (one.channel_zero, 0.0))
        )
        # What isn't rounded: low rank and outliers.
        without = replace(one, coefficients=None, basis=None, outlier_places=None, outliers=None)
        self.corrections = (one.decode() - without.decode())[part].astype(float)

    def channels(self, group: int) -> slice:
        width = self.codes.shape[1] // self.groups
        return slice(group * width, (group + 1) * width)


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
        queries.reshape(-1).copy(), NUMBERS, PANEL, memory(dim), scores,
    )  # fmt: skip
    found = scores.reshape(ROWS, SEGMENT)[:, :count]
    terms_of = Terms(one, part)
    expected = (queries @ terms_of.channel_zero)[:, None] + queries @ terms_of.corrections.T
    for group in range(terms_of.groups):
        channels = terms_of.channels(group)
        scaled = queries[:, channels] * terms_of.channel_scale[channels]
        rounded = rounded_to_int8(scaled.astype(np.float32))
        totals = scaled.sum(axis=1, keepdims=True)
        products = rounded @ terms_of.codes[:, channels].T + terms_of.middle * totals
        expected += terms_of.scale[:, group] * products + terms_of.zero[:, group] * totals
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
        weights.reshape(-1).copy(), NUMBERS, PANEL, memory(dim), sums,
    )  # fmt: skip
    terms_of, seen = Terms(one, part), weights[:, :count].astype(float)
    expected = seen.sum(axis=1)[:, None] * terms_of.channel_zero + seen @ terms_of.corrections
    for group in range(terms_of.groups):
        channels = terms_of.channels(group)
        scaled = (seen * terms_of.scale[:, group]).astype(np.float32)
        rounded = np.concatenate(
            [rounded_to_int8(scaled[:, at : at + 32]) for at in range(0, count, 32)], axis=1
        )
        rest = seen @ terms_of.zero[:, group] + terms_of.middle * scaled.sum(axis=1)
        products = rounded @ terms_of.codes[:, channels] + rest[:, None]
        expected[:, channels] += products * terms_of.channel_scale[channels]
    found = sums.reshape(ROWS, dim)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max() + 1e-6, rtol=0)
    exact = seen @ one.decode()[part]
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max() + 0.02


def test_codes_that_must_be_decoded_are_told() -> None:
    """Those of 8 bits, and groups of channels that are no multiples of 32."""
    for bits, dim, groups, plain in ((4, 64, 2, True), (4, 96, 2, False), (8, 64, 1, False)):
        one = replace(vectors(3, dim, bits, "t"), token_terms=np.ones((3, groups, 2), np.float16))
        fields = np.array(QuantizedBlock.of(one, one).fields[:STREAM_FIELDS], np.int32)
        assert has_plain_codes.py_func(fields, dim) == plain
