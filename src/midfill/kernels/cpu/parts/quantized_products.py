"""Products with quantised keys and values that don't decode them, where codes have up to 4 bits.

With scales and zeros per token and per channel, a key's score is

    q . x = s * sum over c of q'[c] * code[c] + z * sum(q') + q . channel_zero,
    q'[c] = q[c] * channel_scale[c]

and the weighted sum of values is

    sum over t of w[t] * x[t, c] = channel_scale[c] * (sum of w[t] * s[t] * code[t, c]
        + sum of w[t] * z[t]) + channel_zero[c] * sum of w[t].

Where a token has terms for each of two groups of channels, each group is such a vector by itself:
scores are added, sums lie side by side. A low rank and outliers are added afterwards,

    q . x += sum over j of coefficient[t, j] * (q . basis[j]) + sum over outliers of q[c] * outlier,

and likewise to the sums of values.

So codes are multiplied as they are, by the kernels of a KV cache of 4 bits (int4_segments.py),
which round queries and weights to int8. Codes of fewer bits are widened to 4, which takes a shift
and a mask per vector of them.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from midfill.kernels.cpu.bfloat16 import load_pairs
from midfill.kernels.cpu.int4_segments import quantize_block
from midfill.kernels.cpu.intrinsics import generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel, kernel_by_type
from midfill.kernels.cpu.kv_cache import KVArray
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.parts.block_bytes import BlockBytes
from midfill.kernels.cpu.parts.outliers import add_to_scores, add_to_sums
from midfill.kernels.cpu.parts.quantized import MAX_GROUPS, QuantizedScratch, outliers_at
from midfill.kernels.cpu.segment_attention import score_keys, weigh_values
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows, empty
from midfill.kernels.cpu.simd import (
    I32_VECTOR,
    LANES,
    add,
    f32x16,
    fma,
    load,
    multiply,
    splat,
    store,
    sum_lanes,
)
from midfill.kv.quantized_layout import BITS, GROUPS, OUTLIERS, RANK

_UNIT = 32
"""Numbers that the kernels for 4 bits take at a time."""


@inlined_kernel
def _middle(fields: Int32Array) -> Any:
    """Return the code of a stream that stands for 0 where products are computed."""
    return np.float32(1 << (fields[BITS] - 1))


@inlined_kernel
def has_plain_codes(fields: Int32Array, dim: int) -> bool:
    """Return whether codes of a stream can be multiplied as they are."""
    groups = groups_of(fields)
    return bool(fields[BITS] <= 4 and groups <= MAX_GROUPS and dim // groups % _UNIT == 0)


@inlined_kernel
def groups_of(fields: Int32Array) -> int:
    """Return how many groups of channels of a stream are vectors by themselves."""
    return max(int(fields[GROUPS]), 1)


@inlined_kernel
def _load_float_query(entries: KVArray, queries: Float32Array, at: int) -> Any:
    return load(queries, at)


@inlined_kernel
def _load_paired_query(entries: KVArray, queries: Float32Array, at: int) -> Any:
    return load_pairs(queries, at // 2)


@kernel_by_type
def _load_query(entries: Any, *_: Any) -> Any:
    """Load 16 numbers of queries that were prepared for ``entries``; (entries, queries, at)."""
    return _load_paired_query if entries.dtype == types.int16 else _load_float_query


def _every_second(first: int) -> Any:
    """Return a function that takes every second lane of two vectors, from ``first`` on."""

    def take_lanes(context: Any, builder: Any, kinds: Any, low: Any, high: Any) -> Any:
        lanes = list(range(first, 2 * LANES, 2))
        return builder.shuffle_vector(low, high, ir.Constant(I32_VECTOR, lanes))

    return generated(f32x16, f32x16, f32x16)(take_lanes)


_even_lanes, _odd_lanes = map(_every_second, (0, 1))


@inlined_kernel
def _apart(low: Any, high: Any, is_odd: bool) -> Any:
    """Return every second lane of two vectors."""
    return _odd_lanes(low, high) if is_odd else _even_lanes(low, high)


@inlined_kernel
def _token_terms(groups: int, group: int, count: int, memory: QuantizedScratch) -> None:
    """Write tokens' scales for a group of channels to terms[:256], and their zeros to terms[256:].

    Args:
        groups: that a token has terms for, 0 to 2.
        group: number of the group.
        count: of the tokens.
        memory: see above; it has what was loaded.
    """
    terms, tokens = memory.terms, memory.tokens
    for token in range(0, count, LANES):
        scale, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
        if groups == 1:
            low, high = load(tokens, 2 * token), load(tokens, 2 * token + LANES)
            scale, zero = _even_lanes(low, high), _odd_lanes(low, high)
        elif groups == 2:
            low, high = load(tokens, 4 * token), load(tokens, 4 * token + LANES)
            scales, zeros = _even_lanes(low, high), _odd_lanes(low, high)
            low, high = load(tokens, 4 * token + 2 * LANES), load(tokens, 4 * token + 3 * LANES)
            scale = _apart(scales, _even_lanes(low, high), group > 0)
            zero = _apart(zeros, _odd_lanes(low, high), group > 0)
        store(terms, token, scale)
        store(terms, SEGMENT + token, zero)
    if groups > 0:  # behind the last token there is anything
        for token in range(count, (count + LANES - 1) // LANES * LANES):
            terms[token] = np.float32(0.0)
            terms[SEGMENT + token] = np.float32(0.0)


@inlined_kernel
def _scale_queries(
    entries: KVArray, queries: Float32Array, rows: int, dim: int, first: int, width: int,
    memory: QuantizedScratch,
) -> None:  # fmt: skip
    """Round queries of a group, times the scales of a block's channels, to blocks of int8.

    Args:
        entries: of the cache, for which the queries were prepared.
        queries: float32 [rows, dim].
        rows: up to 64.
        dim: elements of a query.
        first, width: the group's channels.
        memory: has the terms of channels, and gets the rows' queries and terms: the sum of q', and
            q . channel_zero.
    """
    scaled = memory.queries
    for row in range(rows):
        total, bias = splat(np.float32(0.0)), splat(np.float32(0.0))
        for d in range(0, width, LANES):
            query = _load_query(entries, queries, row * dim + first + d)
            product = multiply(query, load(memory.channels, first + d))
            store(scaled, row * width + d, product)
            total = add(total, product)
            bias = fma(query, load(memory.channels, dim + first + d), bias)
        memory.row_terms[2 * row] = sum_lanes(total)
        memory.row_terms[2 * row + 1] = sum_lanes(bias)
        quantize_block(scaled, row * width, width, True)


@inlined_kernel
def _group_rows(rows: SegmentRows, width: int) -> SegmentRows:
    """Return rows whose vectors are those of a group."""
    return SegmentRows(
        rows.total, rows.group, rows.limit, rows.window, width, rows.limits, rows.first, rows.start
    )


@inlined_kernel
def _group_span(span: KVSpan, first: int) -> KVSpan:
    """Return the entries of a group: the channels from ``first`` on of a span's."""
    return KVSpan(span.entries, span.base + first, span.slots, span.first, span.length)


@inlined_kernel
def score_codes(
    entries: KVArray, queries: Float32Array, fields: Int32Array, rows: SegmentRows, keys: KVSpan,
    ahead: KVSpan, panel: Float32Array, memory: QuantizedScratch, scores: Float32Array,
) -> None:  # fmt: skip
    """Compute scores[rows, 256] with keys whose codes were loaded (``load_nibbles``).

    Args:
        entries: of the cache, for which the queries were prepared.
        queries: float32 [rows * head_dim].
        fields: int32, of the keys' stream.
        rows: of the block; all see all keys.
        keys: as many in ``memory.entries``, as uint8; slots count groups (``number_groups``).
        ahead: codes to prefetch meanwhile.
        panel: unused.
        memory: of this thread.
        scores: float32 [rows * 256].
    """
    dim, count, groups = rows.head_dim, keys.length, groups_of(fields)
    width = dim // groups
    parts, fetched = _group_rows(rows, width), ahead
    for group in range(groups):
        first = group * width
        products = scores if group == 0 else memory.panel
        _token_terms(int(fields[GROUPS]), group, count, memory)
        _scale_queries(entries, queries, rows.total, dim, first, width, memory)
        score_keys(memory.queries, parts, _group_span(keys, first), fetched, panel, products)
        fetched = empty(ahead)
        for row in range(rows.total):
            total = memory.row_terms[2 * row]
            lifted, sums = splat(_middle(fields) * total), splat(total)
            bias = splat(memory.row_terms[2 * row + 1])
            for key in range(0, count, LANES):
                at = row * SEGMENT + key
                scale, zero = load(memory.terms, key), load(memory.terms, SEGMENT + key)
                found = fma(scale, add(load(products, at), lifted), fma(zero, sums, bias))
                if group > 0:
                    found = add(found, load(scores, at))
                store(scores, at, found)


@inlined_kernel
def weigh_codes(
    weights: Float32Array, fields: Int32Array, rows: SegmentRows, values: KVSpan, ahead: KVSpan,
    panel: Float32Array, memory: QuantizedScratch, sums: Float32Array,
) -> None:  # fmt: skip
    """Compute sums[rows, head_dim] of values whose codes were loaded (``load_nibbles``).

    Args:
        weights: float32 [rows * 256], 0 from the last value on.
        fields: int32, of the values' stream.
        rows: of the block; all see all values.
        values: as many in ``memory.entries``, as uint8; slots count groups (``number_groups``).
        ahead: codes to prefetch meanwhile.
        panel: unused.
        memory: of this thread.
        sums: float32 [rows * head_dim].
    """
    dim, count, groups = rows.head_dim, values.length, groups_of(fields)
    width = dim // groups
    parts, fetched = _group_rows(rows, width), ahead
    top: Any = np.int64(0)
    middle = splat(_middle(fields))
    for group in range(groups):
        first = group * width
        _token_terms(int(fields[GROUPS]), group, count, memory)
        for row in range(rows.total):
            plain, rest = splat(np.float32(0.0)), splat(np.float32(0.0))
            for key in range(0, count, LANES):
                at = row * SEGMENT + key
                weight, zero = load(weights, at), load(memory.terms, SEGMENT + key)
                scaled = multiply(weight, load(memory.terms, key))
                store(memory.panel, at, scaled)
                plain = add(plain, weight)
                rest = fma(weight, zero, fma(scaled, middle, rest))
            memory.row_terms[2 * row] = sum_lanes(rest)
            memory.row_terms[2 * row + 1] = sum_lanes(plain)
        weigh_values(
            memory.panel, parts, _group_span(values, first), fetched, panel, memory.queries, top
        )  # fmt: skip
        fetched = empty(ahead)
        for row in range(rows.total):
            rest, plain = splat(memory.row_terms[2 * row]), splat(memory.row_terms[2 * row + 1])
            for d in range(0, width, LANES):
                at = first + d
                zeros = multiply(plain, load(memory.channels, dim + at))
                found = add(load(memory.queries, row * width + d), rest)
                found = fma(found, load(memory.channels, at), zeros)
                store(sums, row * dim + at, found)


@inlined_kernel
def has_corrections(fields: Int32Array) -> bool:
    """Return whether a stream has a low rank or outliers."""
    return bool(fields[RANK] > 0 or fields[OUTLIERS] > 0)


@kernel
def correct_scores(
    entries: KVArray, source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int,
    queries: Float32Array, rows: SegmentRows, memory: QuantizedScratch, scores: Float32Array,
) -> None:  # fmt: skip
    """Add a stream's low rank and outliers to scores[rows, 256].

    Args:
        entries, queries, rows: see ``score_codes``.
        source, fields, tokens, first, count: see ``load_codes``.
        memory: has the basis and the coefficients.
        scores: float32 [rows * 256].
    """
    dim, rank, plain = rows.head_dim, int(fields[RANK]), memory.queries
    for at in range(0, rows.total * dim, LANES):
        store(plain, at, _load_query(entries, queries, at))
    for row in range(rows.total):
        for j in range(rank):
            products = splat(np.float32(0.0))
            for d in range(0, dim, LANES):
                query = load(plain, row * dim + d)
                products = fma(query, load(memory.basis, j * dim + d), products)
            share = splat(sum_lanes(products))
            for key in range(0, count, LANES):
                at = row * SEGMENT + key
                coefficient = load(memory.coefficients, j * SEGMENT + key)
                store(scores, at, fma(share, coefficient, load(scores, at)))
    if fields[OUTLIERS] > 0:
        add_to_scores(
            source, outliers_at(fields, tokens, dim), int(fields[OUTLIERS]), first, count, dim,
            memory.raw, plain, rows.total, scores,
        )  # fmt: skip


@kernel
def correct_sums(
    source: BlockBytes, fields: Int32Array, tokens: int, first: int, count: int,
    weights: Float32Array, rows: SegmentRows, memory: QuantizedScratch, sums: Float32Array,
) -> None:  # fmt: skip
    """Add a stream's low rank and outliers to sums[rows, head_dim].

    Args:
        source, fields, tokens, first, count: see ``load_codes``.
        weights, rows: see ``weigh_codes``.
        memory: has the basis and the coefficients.
        sums: float32 [rows * head_dim].
    """
    dim, rank = rows.head_dim, int(fields[RANK])
    for row in range(rows.total):
        for j in range(rank):
            products = splat(np.float32(0.0))
            for key in range(0, count, LANES):
                weight = load(weights, row * SEGMENT + key)
                products = fma(weight, load(memory.coefficients, j * SEGMENT + key), products)
            share = splat(sum_lanes(products))
            for d in range(0, dim, LANES):
                at = row * dim + d
                store(sums, at, fma(share, load(memory.basis, j * dim + d), load(sums, at)))
    if fields[OUTLIERS] > 0:
        add_to_sums(
            source, outliers_at(fields, tokens, dim), int(fields[OUTLIERS]), first, count, dim,
            memory.raw, weights, rows.total, sums,
        )  # fmt: skip


@inlined_kernel
def number_groups(numbers: Int32Array, count: int, groups: int) -> None:
    """Write which group of channels, counted over all tokens, is the first of each token."""
    for i in range(count):
        numbers[i] = np.int32(i * groups)
