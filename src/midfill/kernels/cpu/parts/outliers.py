"""Outliers of a quantised stream: what is added to few of its numbers, each with its place.

They are stored after the codes: all places, token * head_dim + channel, ascending, uint16; then
what is added there, float16. They are added to decoded vectors, or, where codes are multiplied as
they are, to scores and to sums of values.
"""

from typing import Any

from numba import types

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel, kernel_by_type
from midfill.kernels.cpu.kv_cache import KVArray, load_entry, store_entry
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.parts.block_bytes import (
    HALF,
    BlockBytes,
    byte_pointer,
    copy_bytes,
    copy_halves,
)
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.simd import I16, LANES, address, load, store

_AT_ONCE = 256
"""Outliers that are loaded at a time: their places to ``raw``, their values to raw[256:]."""


@generated(types.intp, OWN, INDEX)
def _load_place(context: Any, builder: Any, kinds: Any, array: Any, at: Any) -> Any:
    """Load a uint16 from byte ``at`` of an array."""
    pointer = byte_pointer(context, builder, kinds[0], array, at)
    place = builder.load(builder.bitcast(pointer, I16.as_pointer()))
    place.align = 1
    return builder.zext(place, context.get_value_type(types.intp))


@generated(types.void, OWN, INDEX, OWN, INDEX, types.float32)
def _add_product(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Set sums[at] += factors[number] * factor, without a branch for numbers below 0.

    Arguments: (sums, at, factors, number, factor).
    """
    sums, at, factors, number, factor = arguments
    place = address(context, builder, kinds[0], sums, at)
    other = builder.load(address(context, builder, kinds[2], factors, number))
    builder.store(builder.fadd(builder.load(place), builder.fmul(other, factor)), place)


@inlined_kernel
def _first_from(source: BlockBytes, at: int, outliers: int, place: int, raw: Float32Array) -> int:
    """Return the number of the first outlier at a place from ``place`` on."""
    low, high = 0, outliers
    while low < high:
        middle = (low + high) // 2
        copy_bytes(source, at + middle * HALF, HALF, raw, 0)
        if _load_place(raw, 0) < place:
            low = middle + 1
        else:
            high = middle
    return low


@inlined_kernel
def _load(source: BlockBytes, at: int, outliers: int, start: int, raw: Float32Array) -> int:
    """Load outliers from number ``start`` on, see ``_AT_ONCE``; return how many."""
    taken = min(_AT_ONCE, outliers - start)
    copy_halves(source, at + (outliers + start) * HALF, taken, raw, raw, _AT_ONCE)
    copy_bytes(source, at + start * HALF, taken * HALF, raw, 0)
    return taken


@inlined_kernel
def _inverse(dim: int) -> int:
    """Return what a place is multiplied with to get its token, times 2^32; exact below 2^16.

    Counting tokens up in a loop would cost a branch that can't be foreseen per outlier.
    """
    return (1 << 32) // dim + 1


@kernel
def add_to_entries(
    source: BlockBytes, at: int, outliers: int, first: int, count: int, dim: int,
    raw: Float32Array, out: KVArray,
) -> None:  # fmt: skip
    """Add the outliers of ``count`` tokens, from ``first`` on, to their decoded vectors.

    Args:
        source: the block.
        at: its byte at which the outliers start.
        outliers: how many the stream has.
        first, count: see above.
        dim: elements of a vector.
        raw: float32, scratch of at least 1,024.
        out: entries, the vector of token ``first`` at first.
    """
    start = _first_from(source, at, outliers, first * dim, raw)
    while start < outliers:
        taken = _load(source, at, outliers, start, raw)
        for number in range(taken):
            place = _load_place(raw, number * HALF) - first * dim
            if place >= count * dim:
                return
            _add_number(out, place, raw[_AT_ONCE + number], raw)
        start += taken


@inlined_kernel
def _add_to_float(out: KVArray, at: int, value: float, scratch: Float32Array) -> None:
    out[at] += value


@inlined_kernel
def _add_in_vector(out: KVArray, at: int, value: float, scratch: Float32Array) -> None:
    lane, room = at % LANES, 3 * _AT_ONCE
    store(scratch, room, load_entry(out, at - lane))
    scratch[room + lane] += value
    store_entry(out, at - lane, load(scratch, room))


@kernel_by_type
def _add_number(out: Any, *_: Any) -> Any:
    """Add to a number of entries. Arguments: (out, at, value float32, scratch float32).

    One of a format that can't be rounded to alone is written anew with the vector that it is in.
    """
    return _add_to_float if out.dtype == types.float32 else _add_in_vector


@kernel
def add_to_scores(
    source: BlockBytes, at: int, outliers: int, first: int, count: int, dim: int,
    raw: Float32Array, queries: Float32Array, rows: int, scores: Float32Array,
) -> None:  # fmt: skip
    """Add what rows' queries make of the outliers of keys to scores[rows, 256].

    Args:
        source, at, outliers, first, count, dim, raw: see ``add_to_entries``.
        queries: float32 [rows, dim].
        rows: how many.
        scores: float32 [rows * 256], of key ``first`` at first.
    """
    start, inverse = _first_from(source, at, outliers, first * dim, raw), _inverse(dim)
    while start < outliers:
        taken = _load(source, at, outliers, start, raw)
        for number in range(taken):
            place = _load_place(raw, number * HALF) - first * dim
            if place >= count * dim:
                return
            key = (place * inverse) >> 32
            value = raw[_AT_ONCE + number]
            for row in range(rows):
                from_query = (row - key) * dim + place
                _add_product(scores, row * SEGMENT + key, queries, from_query, value)
        start += taken


@kernel
def add_to_sums(
    source: BlockBytes, at: int, outliers: int, first: int, count: int, dim: int,
    raw: Float32Array, weights: Float32Array, rows: int, sums: Float32Array,
) -> None:  # fmt: skip
    """Add the weighted outliers of values to sums[rows, dim].

    Args:
        source, at, outliers, first, count, dim, raw: see ``add_to_entries``.
        weights: float32 [rows * 256], of value ``first`` at first.
        rows: how many.
        sums: float32 [rows * dim].
    """
    start, inverse = _first_from(source, at, outliers, first * dim, raw), _inverse(dim)
    while start < outliers:
        taken = _load(source, at, outliers, start, raw)
        for number in range(taken):
            place = _load_place(raw, number * HALF) - first * dim
            if place >= count * dim:
                return
            key = (place * inverse) >> 32
            value = raw[_AT_ONCE + number]
            for row in range(rows):
                to = (row - key) * dim + place
                _add_product(sums, to, weights, row * SEGMENT + key, value)
        start += taken
