"""One segment of bfloat16 keys: scores, softmax weights, and weighted sums of V.

Queries and weights are rounded to bfloat16 as well, and products are of pairs (pair_panels.py), so
a chip with AVX512-BF16 multiplies about twice as fast as in float32. Sums stay float32. The
weights of a row are divided by the sum of their rounded selves.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.bfloat16 import store_pairs, store_weights
from midfill.kernels.cpu.intrinsics import generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.kv_spans import KVSpan
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.pair_panels import (
    MAX_PAIR_ROWS,
    NARROW,
    WIDE,
    multiply_pairs_narrow,
    multiply_pairs_wide,
    pack_keys,
    pack_values,
    weigh_pairs_in_place,
)
from midfill.kernels.cpu.segment_rows import SEGMENT, SegmentRows, blind_rows, empty, keys_seen
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I32_VECTOR,
    LANES,
    constant,
    f32x16,
    fma,
    fused_multiply_add,
    integers,
    keep_lanes,
    load,
    max_lanes,
    maximum,
    splat,
    store,
    sum_lanes,
)
from midfill.kernels.cpu.softmax import clear_states

_MINUS_INFINITY = np.float32(-np.inf)
_LOG2_E = np.float32(1.44269504088896341)
_MIN_EXPONENT = -127.0
_POLYNOMIAL = (0.05500860620334782, 0.24221100823679684, 0.6932829674188516, 1.0)
"""2^r for |r| <= 1/2 to a relative error of 1e-4, highest power first; 1 at 0."""


FEW_PAIRS, MANY_PAIRS = 16, 64
"""Pairs of values in a panel."""


def panel_words(head_dim: int) -> int:
    """Return how many words the panels of a head need."""
    return WIDE * max(head_dim // 2, MANY_PAIRS)


@generated(f32x16, f32x16)
def power_of_two(context: Any, builder: Any, kinds: Any, x: Any) -> Any:
    """Return 2^x for x <= 0, as exactly as bfloat16 asks for; exactly 1 at 0, and 0 at -127.

    2^x = 2^n * 2^r with n = round(x). Adding 1.5 * 2^23 rounds to a whole number and leaves it in
    the lowest bits, from where it is added to the exponent of 2^r. Below -126 results are
    subnormal and meaningless.
    """
    least = constant(_MIN_EXPONENT)
    x = builder.select(builder.fcmp_ordered(">", x, least), x, least)
    magic = constant(12582912.0)
    shifted = builder.fadd(x, magic)
    r = builder.fsub(x, builder.fsub(shifted, magic))
    result = constant(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        result = fused_multiply_add(builder, result, r, constant(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, I32_VECTOR), integers(23))
    bits = builder.add(builder.bitcast(result, I32_VECTOR), exponent)
    return builder.bitcast(bits, F32_VECTOR)


@inlined_kernel
def round_queries(queries: Float32Array, count: int) -> None:
    """Round ``count`` numbers of queries to pairs, in place: rows of head_dim / 2 words."""
    for i in range(0, count, LANES):
        store_pairs(queries, i // 2, load(queries, i))


@inlined_kernel
def _next_rows(left: int) -> int:
    """Return how many of the rows left are multiplied next: 6, or what leaves no single row."""
    if left <= MAX_PAIR_ROWS:
        return left
    return 4 if left == MAX_PAIR_ROWS + 1 else MAX_PAIR_ROWS


@kernel
def _multiply(
    wide: bool, n: int, a: Float32Array, at: int, stride: int, pairs: int, panel: Float32Array,
    added: bool, out: Float32Array, to: int, out_stride: int,
) -> None:  # fmt: skip
    """Compute n rows of ``out`` = rows of ``a`` times a panel; see ``_multiply_pairs``."""
    if wide:
        multiply_pairs_wide(n, a, at, stride, pairs, panel, added, out, to, out_stride)
    else:
        multiply_pairs_narrow(n, a, at, stride, pairs, panel, added, out, to, out_stride)


@inlined_kernel
def score_pairs(
    queries: Float32Array, rows: SegmentRows, keys: KVSpan, ahead: KVSpan, panel: Float32Array,
    scores: Float32Array,
) -> None:  # fmt: skip
    """Compute scores[rows, 256] = queries times keys, at least where a row sees the key.

    Args:
        queries: float32 [rows * head_dim / 2], words (``round_queries``).
        rows: the tile.
        keys: the segment's keys.
        ahead: entries to prefetch meanwhile.
        panel: float32 [panel_words(head_dim)], scratch.
        scores: float32 [rows * 256].
    """
    dim, depth, key = rows.head_dim, rows.head_dim // 2, 0
    seen_by_all = min(keys.length, keys_seen(rows, 0))
    while key < keys.length:
        # Keys that the first rows don't see come in narrow panels, of which these rows skip more.
        wide = key + WIDE <= seen_by_all
        width = WIDE if wide else NARROW
        for part in range(0, min(width, keys.length - key), LANES):
            pack_keys(keys, key + part, dim, ahead, panel, part, width)
        row = blind_rows(rows, key)
        while row < rows.total:
            n = _next_rows(rows.total - row)
            at, to = row * depth, row * SEGMENT + key
            _multiply(wide, n, queries, at, depth, depth, panel, False, scores, to, SEGMENT)
            row += n
        key += width


@inlined_kernel
def _hide_keys(scores: Float32Array, part: int, low: int, high: int) -> None:
    """Set those of 32 scores from ``part`` on to -inf that are not low <= i < high."""
    for i in range(part, part + 2 * LANES, LANES):
        store(scores, i, keep_lanes(load(scores, i), low - i, high - i, _MINUS_INFINITY))


@inlined_kernel
def _clear_pairs(weights: Float32Array, at: int, start: int, end: int) -> None:
    """Set the weights of keys start to end, multiples of 32, of the row at weights[at] to 0."""
    for part in range(start, end, 2 * LANES):
        store(weights, at + part // 2, splat(np.float32(0.0)))


@inlined_kernel
def _weigh_row(
    scores: Float32Array, at: int, count: int, first: int, end: int, states: Float32Array, row: int
) -> None:
    """Replace a row's ``count`` scores by weights, as words, and set its state.

    Keys outside first <= key < end are not seen: their weights are 0.
    """
    low, high = max(first, 0), min(end, count)
    stop = (count + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    if low >= high:
        clear_states(states, row, 1)
        _clear_pairs(scores, at, 0, stop)
        return
    begin = low // (2 * LANES) * (2 * LANES)
    last = (high - 1) // (2 * LANES) * (2 * LANES)
    if low > begin:
        _hide_keys(scores, at + begin, at + low, at + high)
    if high < last + 2 * LANES:
        _hide_keys(scores, at + last, at + low, at + high)
    maxima = load(scores, at + begin)
    for part in range(begin + LANES, last + 2 * LANES, LANES):
        maxima = maximum(maxima, load(scores, at + part))
    peak = max_lanes(maxima)
    # If all scores are infinite, any finite shift keeps 2^x away from inf - inf.
    shift = splat(peak * -_LOG2_E if peak > _MINUS_INFINITY else np.float32(0.0))
    factor, total = splat(_LOG2_E), splat(np.float32(0.0))
    # Words take half the room of scores, so no score is overwritten before it is read.
    _clear_pairs(scores, at, 0, begin)
    for part in range(begin, last + 2 * LANES, 2 * LANES):
        one = power_of_two(fma(load(scores, at + part), factor, shift))
        two = power_of_two(fma(load(scores, at + part + LANES), factor, shift))
        total = store_weights(scores, at + part // 2, one, two, total)
    _clear_pairs(scores, at, last + 2 * LANES, stop)
    states[row * 2] = peak
    states[row * 2 + 1] = sum_lanes(total)


@inlined_kernel
def softmax_pairs(
    rows: SegmentRows, count: int, scores: Float32Array, states: Float32Array, first_row: int
) -> None:
    """Replace scores[rows, 256] by weights, as 128 words at each row's start; set the states.

    Args:
        rows: the tile.
        count: keys of the segment.
        scores: float32 [rows * 256].
        states: of SoftmaxSums.
        first_row: where the rows start in ``states``.
    """
    for row in range(rows.total):
        end = keys_seen(rows, row)
        first = end - rows.window if rows.window > 0 else 0
        _weigh_row(scores, row * SEGMENT, count, first, end, states, first_row + row)


@inlined_kernel
def _weigh_block(
    weights: Float32Array, rows: SegmentRows, first: int, end: int, panel: Float32Array,
    width: int, added: bool, sums: Float32Array, at: int,
) -> None:  # fmt: skip
    """Compute the products of all rows with a panel of the values of pairs first to end."""
    row, dim = 0, rows.head_dim
    if added:
        # What the panel's first key is not seen by has no weights here.
        row = min(blind_rows(rows, 2 * first), rows.total)
    while row < rows.total:
        n = _next_rows(rows.total - row)
        from_row, to = row * SEGMENT + first, at + row * dim
        count = min(end, (keys_seen(rows, row + n - 1) + 1) // 2) - first
        wide = width == WIDE
        _multiply(wide, n, weights, from_row, SEGMENT, count, panel, added, sums, to, dim)
        row += n


@inlined_kernel
def _weigh_in_place(
    weights: Float32Array, rows: SegmentRows, values: KVSpan, first: int, end: int, ahead: KVSpan,
    sums: Float32Array, at: int,
) -> None:  # fmt: skip
    """Compute ``weigh_pairs`` for 1 to 6 rows, over pairs first to end, without panels."""
    dim, n = rows.head_dim, rows.total
    for d in range(0, dim, WIDE):
        to = at + d
        weigh_pairs_in_place(
            n, weights, first, SEGMENT, values, first, end, dim, d, ahead, sums, to
        )
        ahead = empty(ahead)


@inlined_kernel
def weigh_pairs(
    weights: Float32Array, rows: SegmentRows, values: KVSpan, ahead: KVSpan, panel: Float32Array,
    sums: Float32Array, at: int,
) -> None:  # fmt: skip
    """Compute sums[rows, head_dim] at ``at`` = weights[rows, 256] @ V.

    Args:
        weights: float32 [rows * 256], words at each row's start; 0 for keys that it does not see.
        rows: the tile.
        values: the segment's values.
        ahead: entries to prefetch meanwhile.
        panel: float32 [panel_words(head_dim)], scratch.
        sums: float32, where the sums go.
        at: element of ``sums`` at which they start.
    """
    d, dim = 0, rows.head_dim
    lowest = max(0, keys_seen(rows, 0) - rows.window) // 2 if rows.window > 0 else 0
    highest = (min(values.length, keys_seen(rows, rows.total - 1)) + 1) // 2
    if rows.total <= MAX_PAIR_ROWS and dim % WIDE == 0:
        _weigh_in_place(weights, rows, values, lowest, highest, ahead, sums, at)
        return
    # Few rows are done with a pair soon: shorter blocks spread what is read and prefetched.
    block = FEW_PAIRS if rows.total <= 2 * MAX_PAIR_ROWS else MANY_PAIRS
    while d < dim:
        width = WIDE if d + WIDE <= dim else NARROW
        for first in range(lowest, max(highest, lowest + 1), block):
            end = min(first + block, highest)
            pack_values(values, first, end, dim, d, width, ahead, panel)
            _weigh_block(weights, rows, first, end, panel, width, first > lowest, sums, at + d)
        ahead = empty(ahead)
        d += width
