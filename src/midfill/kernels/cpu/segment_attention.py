"""What attention does with one segment of keys, by the format of the KV cache.

Where it is bfloat16, queries and weights are rounded too, and products are of pairs
(pair_segments.py); where it has 4 bits, they are rounded to int8 (int4_segments.py). In the other
formats queries and weights are float32 (segments.py). What all have in common is that scores are
float32 [rows, 256], and that sums are.
"""

from typing import Any

from numba import types

from midfill.kernels.cpu.bfloat16 import load_pairs, store_pairs
from midfill.kernels.cpu.int4_segments import (
    quantize_queries,
    score_int4_segment,
    weigh_int4_segment,
)
from midfill.kernels.cpu.jit import inlined_kernel, kernel, kernel_by_type
from midfill.kernels.cpu.kv_cache import KVArray, is_packed
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.pair_segments import (
    round_queries,
    score_pairs,
    softmax_pairs,
    weigh_pairs,
)
from midfill.kernels.cpu.ragged_cells import VALUE_FACTOR, HeadKeys, RaggedCells, gather_term
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows, keys_seen
from midfill.kernels.cpu.segments import score_segment, weigh_segment
from midfill.kernels.cpu.simd import LANES, load, multiply, store
from midfill.kernels.cpu.softmax import softmax_row


def _is_paired(entries: Any) -> bool:
    """Return whether an array of this Numba type holds bfloat16."""
    return bool(entries.dtype == types.int16)


@inlined_kernel
def _keep_queries(entries: KVArray, queries: Float32Array, rows: int, head_dim: int) -> None:
    """Leave queries as they are."""


@inlined_kernel
def _round_queries(entries: KVArray, queries: Float32Array, rows: int, head_dim: int) -> None:
    round_queries(queries, rows * head_dim)


@inlined_kernel
def _softmax_rows(
    entries: KVArray, rows: SegmentRows, count: int, scores: Float32Array, states: Float32Array,
    first_row: int,
) -> None:  # fmt: skip
    for row in range(rows.total):
        end = keys_seen(rows, row)
        first = end - rows.window if rows.window > 0 else 0
        softmax_row(scores, row * SEGMENT, count, first, end, states, first_row + row)


@inlined_kernel
def _softmax_pairs(
    entries: KVArray, rows: SegmentRows, count: int, scores: Float32Array, states: Float32Array,
    first_row: int,
) -> None:  # fmt: skip
    softmax_pairs(rows, count, scores, states, first_row)


@inlined_kernel
def _scale_column(
    entries: KVArray, weights: Float32Array, column: int, rows: int, factor: Any
) -> None:
    for row in range(rows):
        at = row * SEGMENT + column
        store(weights, at, multiply(load(weights, at), factor))


@inlined_kernel
def _scale_pair_column(
    entries: KVArray, weights: Float32Array, column: int, rows: int, factor: Any
) -> None:
    for row in range(rows):
        word = row * SEGMENT + column // 2
        store_pairs(weights, word, multiply(load_pairs(weights, word), factor))


@inlined_kernel
def _weigh_rows(
    weights: Float32Array, rows: SegmentRows, values: KVSpan, ahead: KVSpan, panel: Float32Array,
    sums: Float32Array, at: int,
) -> None:  # fmt: skip
    weigh_segment(weights, rows, values, ahead, sums, at)


@kernel_by_type
def prepare_queries(entries: Any, *_: Any) -> Any:
    """Prepare scaled queries, in place, for keys in ``entries``.

    Arguments: (entries, queries float32 [rows * head_dim], rows, head_dim).
    """
    if is_packed(entries):
        return quantize_queries
    return _round_queries if _is_paired(entries) else _keep_queries


@kernel_by_type
def score_keys(queries: Any, rows: Any, keys: Any, *_: Any) -> Any:
    """Compute scores[rows, 256]; arguments as of ``score_segment``, whatever the format."""
    if is_packed(keys.types[0]):
        return score_int4_segment
    return score_pairs if _is_paired(keys.types[0]) else score_segment


@kernel_by_type
def softmax_segment(entries: Any, *_: Any) -> Any:
    """Replace scores by weights for values in ``entries``, and set the rows' states.

    Arguments: (entries, rows, count, scores, states, first_row) as of ``softmax_pairs``.
    """
    return _softmax_pairs if _is_paired(entries) else _softmax_rows


@kernel_by_type
def scale_column(entries: Any, *_: Any) -> Any:
    """Multiply the weights [rows, 256] of 16 keys, from ``column`` on, by a vector of factors.

    Arguments: (entries, weights, column, rows, factor).
    """
    return _scale_pair_column if _is_paired(entries) else _scale_column


@kernel
def apply_value_factors(
    entries: KVArray, ragged: RaggedCells, keys: HeadKeys, start: int, count: int,
    gathered: Float32Array, rows: int, weights: Float32Array,
) -> None:  # fmt: skip
    """weights[rows, 256] *= value factor, for the keys of a segment.

    Args:
        entries: the values, whose format is that of the weights.
        start: the segment's first key; ``count`` as there are keys in it.
        gathered: 16 floats of a thread's own.
    """
    for part in range(0, min(count, keys.cells - start), LANES):
        gather_term(ragged, keys, VALUE_FACTOR, start + part, 1.0, gathered, 0)
        scale_column(entries, weights, part, rows, load(gathered, 0))


@kernel_by_type
def weigh_values(weights: Any, rows: Any, values: Any, *_: Any) -> Any:
    """Compute sums[rows, head_dim]; arguments as of ``weigh_pairs``."""
    if is_packed(values.types[0]):
        return weigh_int4_segment
    return weigh_pairs if _is_paired(values.types[0]) else _weigh_rows
