"""Products with quantised keys and values that don't decode them, where codes have up to 4 bits.

With scales and zeros per token and per channel, and no other terms, a key's score is

    q . x = s * sum over c of q'[c] * code[c] + z * sum(q') + q . channel_zero,
    q'[c] = q[c] * channel_scale[c]

and the weighted sum of values is

    sum over t of w[t] * x[t, c] = channel_scale[c] * (sum of w[t] * s[t] * code[t, c]
        + sum of w[t] * z[t]) + channel_zero[c] * sum of w[t].

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
from midfill.kernels.cpu.jit import inlined_kernel, kernel_by_type
from midfill.kernels.cpu.kv_cache import KVArray
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.parts.quantized import QuantizedScratch
from midfill.kernels.cpu.segment_attention import score_keys, weigh_values
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows
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
    has_others = fields[RANK] > 0 or fields[OUTLIERS] > 0 or fields[GROUPS] > 1
    return bool(fields[BITS] <= 4 and not has_others and dim % _UNIT == 0)


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
def _part_terms(groups: int, count: int, memory: QuantizedScratch) -> None:
    """Write the scales of tokens to coefficients[:256] and their zeros to coefficients[256:]."""
    terms, tokens = memory.coefficients, memory.tokens
    for token in range(0, count, LANES):
        scale, zero = splat(np.float32(1.0)), splat(np.float32(0.0))
        if groups > 0:
            low, high = load(tokens, 2 * token), load(tokens, 2 * token + LANES)
            scale, zero = _even_lanes(low, high), _odd_lanes(low, high)
        store(terms, token, scale)
        store(terms, SEGMENT + token, zero)
    if groups > 0:  # behind the last token there is anything
        for token in range(count, (count + LANES - 1) // LANES * LANES):
            terms[token] = np.float32(0.0)
            terms[SEGMENT + token] = np.float32(0.0)


@inlined_kernel
def _scale_queries(
    entries: KVArray, queries: Float32Array, rows: int, dim: int, memory: QuantizedScratch
) -> None:
    """Round queries, times the scales of a block's channels, to blocks of int8.

    Args:
        entries: of the cache, for which the queries were prepared.
        queries: float32 [rows, dim].
        rows: up to 64.
        dim: elements of a query.
        memory: has the terms of channels, and gets the rows' queries and terms: the sum of q', and
            q . channel_zero.
    """
    scaled = memory.queries
    for row in range(rows):
        total, bias = splat(np.float32(0.0)), splat(np.float32(0.0))
        for d in range(0, dim, LANES):
            query = _load_query(entries, queries, row * dim + d)
            product = multiply(query, load(memory.channels, d))
            store(scaled, row * dim + d, product)
            total = add(total, product)
            bias = fma(query, load(memory.channels, dim + d), bias)
        memory.row_terms[2 * row] = sum_lanes(total)
        memory.row_terms[2 * row + 1] = sum_lanes(bias)
        quantize_block(scaled, row * dim, dim, True)


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
        keys: as many in ``memory.entries``, as uint8.
        ahead: codes to prefetch meanwhile.
        panel: unused.
        memory: of this thread.
        scores: float32 [rows * 256].
    """
    dim, count = rows.head_dim, keys.length
    _part_terms(int(fields[GROUPS]), count, memory)
    _scale_queries(entries, queries, rows.total, dim, memory)
    score_keys(memory.queries, rows, keys, ahead, panel, scores)
    for row in range(rows.total):
        total = memory.row_terms[2 * row]
        lifted, sums = splat(_middle(fields) * total), splat(total)
        bias = splat(memory.row_terms[2 * row + 1])
        for key in range(0, count, LANES):
            at = row * SEGMENT + key
            scale, zero = load(memory.coefficients, key), load(memory.coefficients, SEGMENT + key)
            rest = fma(zero, sums, bias)
            store(scores, at, fma(scale, add(load(scores, at), lifted), rest))


@inlined_kernel
def weigh_codes(
    weights: Float32Array, fields: Int32Array, rows: SegmentRows, values: KVSpan, ahead: KVSpan,
    panel: Float32Array, memory: QuantizedScratch, sums: Float32Array,
) -> None:  # fmt: skip
    """Compute sums[rows, head_dim] of values whose codes were loaded (``load_nibbles``).

    Args:
        weights: float32 [rows * 256], 0 from the last value on; they are overwritten.
        fields: int32, of the values' stream.
        rows: of the block; all see all values.
        values: as many in ``memory.entries``, as uint8.
        ahead: codes to prefetch meanwhile.
        panel: unused.
        memory: of this thread.
        sums: float32 [rows * head_dim].
    """
    dim, count = rows.head_dim, values.length
    top: Any = np.int64(0)
    _part_terms(int(fields[GROUPS]), count, memory)
    middle = splat(_middle(fields))
    for row in range(rows.total):
        plain, rest = splat(np.float32(0.0)), splat(np.float32(0.0))
        for key in range(0, count, LANES):
            at = row * SEGMENT + key
            weight, zero = load(weights, at), load(memory.coefficients, SEGMENT + key)
            scaled = multiply(weight, load(memory.coefficients, key))
            store(weights, at, scaled)
            plain = add(plain, weight)
            rest = fma(weight, zero, fma(scaled, middle, rest))
        memory.row_terms[2 * row] = sum_lanes(rest)
        memory.row_terms[2 * row + 1] = sum_lanes(plain)
    weigh_values(weights, rows, values, ahead, panel, sums, top)
    for row in range(rows.total):
        rest, plain = splat(memory.row_terms[2 * row]), splat(memory.row_terms[2 * row + 1])
        for d in range(0, dim, LANES):
            at = row * dim + d
            zeros = multiply(plain, load(memory.channels, dim + d))
            found = add(load(sums, at), rest)
            store(sums, at, fma(found, load(memory.channels, d), zeros))
