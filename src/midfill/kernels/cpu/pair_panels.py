"""bfloat16 products: panels of pairs, and rows of pairs times a panel.

Attention multiplies pairs twice: queries with keys, in pairs of dimensions, and weights with
values, in pairs of keys. Both are rows of words times a panel [pairs, width] of words. A panel of
keys is 16 x 16 blocks of words, transposed; a panel of values has two entries interleaved.

A result is one sum over the pairs, from first to last (bfloat16.py). So it has the same bits
whatever other rows a call computes, and however wide the panel is.
"""

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.bfloat16 import add_pair_products
from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import kernel_by_number
from midfill.kernels.cpu.key_panels import transpose
from midfill.kernels.cpu.kv_spans import SpanCode
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I16,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Sums,
    address,
    broadcast,
    constant,
    integer,
    load_unaligned,
    row_pointers,
    store_unaligned,
)

WIDE, NARROW = 64, 32
"""Widths of panels."""
MAX_PAIR_ROWS = 6
"""Maximum rows that are multiplied at a time."""

_BOTH = 2 * LANES
_I16_VECTOR = ir.VectorType(I16, _BOTH)


@generated(types.void, OWN, INDEX, INDEX, OWN, OWN, INDEX, INDEX)
def pack_keys(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Write 16 keys of a span, from number ``key`` on, to columns of panel[head_dim / 2, width].

    Beyond the span's end, its last key is repeated. Entries of the same numbers are prefetched
    from the span ``ahead``.

    Args:
        keys: a KVSpan of bfloat16.
        ahead: a KVSpan.
        panel: float32, words.
        at: the first column.
    """
    keys, key, dim, ahead, panel, at, width = arguments
    span = SpanCode(context, builder, kinds[0], keys, dim)
    prefetched = SpanCode(context, builder, kinds[3], ahead, dim)
    start = address(context, builder, kinds[4], panel, at)
    entries = [span.entry(builder.add(key, integer(i))) for i in range(LANES)]
    for i in range(0, LANES, 4):
        prefetched.prefetch(builder.add(key, integer(i)), 4)
    chunks = builder.sdiv(dim, integer(_BOTH))
    with cgutils.for_range(builder, chunks, intp=I64) as chunk:
        d = builder.mul(chunk.index, integer(_BOTH))
        rows = [load_unaligned(builder, builder.gep(e, [d]), F32_VECTOR) for e in entries]
        word = builder.mul(chunk.index, builder.mul(width, integer(LANES)))
        target = builder.gep(start, [word])
        for i, column in enumerate(transpose(builder, rows)):
            place = builder.gep(target, [builder.mul(width, integer(i))])
            store_unaligned(builder, column, place)


@generated(types.void, OWN, INDEX, INDEX, INDEX, INDEX, INDEX, OWN, OWN)
def pack_values(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Write pairs first to end of a span's entries to panel[end - first, width].

    Pair i is entries 2i and 2i + 1; beyond the span's end, its last entry is repeated. Entries of
    the same numbers are prefetched from the span ``ahead``.

    Args:
        values: a KVSpan of bfloat16.
        dim: the first of ``width`` dimensions.
        width: a multiple of 32.
        ahead: a KVSpan.
        panel: float32, words.
    """
    values, first, end, head_dim, dim, width, ahead, panel = arguments
    span = SpanCode(context, builder, kinds[0], values, head_dim)
    prefetched = SpanCode(context, builder, kinds[6], ahead, head_dim)
    start = address(context, builder, kinds[7], panel, integer(0))
    chunks = builder.sdiv(width, integer(_BOTH))
    with cgutils.for_range(builder, end, start=first, intp=I64) as loop:
        entry = builder.mul(loop.index, integer(2))
        prefetched.prefetch(entry, 2)
        pair = _pair_of(builder, span, entry, dim)
        row = builder.gep(start, [builder.mul(builder.sub(loop.index, first), width)])
        with cgutils.for_range(builder, chunks, intp=I64) as chunk:
            d = builder.mul(chunk.index, integer(_BOTH))
            numbers = [load_unaligned(builder, builder.gep(p, [d]), _I16_VECTOR) for p in pair]
            for i, words in enumerate(_interleave(builder, *numbers)):
                place = builder.gep(row, [builder.add(d, integer(i * LANES))])
                store_unaligned(builder, words, place)


def _pair_of(builder: ir.IRBuilder, span: SpanCode, entry: Any, dim: Any) -> list[Any]:
    """Return where two entries hold their numbers from dimension ``dim`` on."""
    return [builder.gep(span.entry(builder.add(entry, integer(i))), [dim]) for i in range(2)]


def _interleave(builder: ir.IRBuilder, a: Any, b: Any) -> list[Any]:
    """Return 32 words, in two vectors, with a number of ``a`` and one of ``b`` each."""
    vectors = []
    for start in (0, LANES):
        order = [lane for i in range(start, start + LANES) for lane in (i, _BOTH + i)]
        vectors.append(builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, _BOTH), order)))
    return vectors


def _first_totals(builder: ir.IRBuilder, places: list[list[Any]], added: Any) -> list[list[Any]]:
    """Return running sums that LLVM keeps in registers, of what is stored already, or of 0."""
    totals = [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in row] for row in places]
    with builder.if_else(added) as (then, otherwise):
        with then:
            for place, total in _paired(places, totals):
                builder.store(load_unaligned(builder, place, F32_VECTOR), total)
        with otherwise:
            for _, total in _paired(places, totals):
                builder.store(constant(0.0), total)
    return totals


def _paired(places: list[list[Any]], totals: list[list[Any]]) -> Iterator[tuple[Any, Any]]:
    for row_places, row_totals in zip(places, totals, strict=True):
        yield from zip(row_places, row_totals, strict=True)


def _multiply_pairs(rows: int, vectors: int) -> Any:
    """Generate the kernel for ``rows`` rows and a panel of ``vectors`` * 16 columns."""

    @generated(types.void, OWN, INDEX, INDEX, INDEX, OWN, types.boolean, OWN, INDEX, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute out[rows, width] = a[rows, pairs] times panel[pairs, width].

        Args:
            a: float32, words, rows a_stride apart, from a_at on.
            pairs: how many; may be negative.
            panel: float32, words.
            added: whether the products are added to what ``out`` holds.
            out: float32, rows out_stride apart, from out_at on.
        """
        a, a_at, a_stride, pairs, panel, added, out, out_at, out_stride = arguments
        start = address(context, builder, kinds[0], a, a_at)
        a_rows = row_pointers(builder, start, a_stride, rows)
        panel_start = address(context, builder, kinds[4], panel, integer(0))
        start = address(context, builder, kinds[6], out, out_at)
        targets = row_pointers(builder, start, out_stride, rows)
        places = [
            [builder.gep(target, [integer(v * LANES)]) for v in range(vectors)]
            for target in targets
        ]
        totals = _first_totals(builder, places, added)
        with cgutils.for_range(builder, pairs, intp=I64) as loop:
            at = builder.mul(loop.index, integer(vectors * LANES))
            columns = [
                load_unaligned(
                    builder,
                    builder.gep(panel_start, [builder.add(at, integer(v * LANES))]),
                    I32_VECTOR,
                )
                for v in range(vectors)
            ]
            for row, sums in zip(a_rows, totals, strict=True):
                word = _broadcast_word(builder, row, loop.index)
                for total, column in zip(sums, columns, strict=True):
                    before = builder.load(total)
                    after = add_pair_products(context, builder, before, word, column)
                    builder.store(after, total)
        for place, total in _paired(places, totals):
            store_unaligned(builder, builder.load(total), place)

    return operation


multiply_pairs_wide, multiply_pairs_narrow = (
    kernel_by_number({rows: _multiply_pairs(rows, vectors) for rows in (6, 3, 4, 5, 2, 1)})
    for vectors in (4, 2)
)


def _broadcast_word(builder: ir.IRBuilder, row: Any, place: Any) -> Any:
    """Return 16 times a row's word at ``place``."""
    word = broadcast(builder, builder.load(builder.gep(row, [place])))
    return builder.bitcast(word, I32_VECTOR)


def _add_value_pair(
    context: Any, builder: ir.IRBuilder, pair: list[Any], words: list[Any],
    totals: list[list[Any]],
) -> None:  # fmt: skip
    """Add the products of each row's word with a pair of values to the row's sums.

    Args:
        pair: where both values start.
        words: a vector per row.
        totals: of each row, in the order of dimensions.
    """
    for first in range(0, len(totals[0]), 2):
        places = [builder.gep(value, [integer(first * LANES)]) for value in pair]
        numbers = [load_unaligned(builder, place, _I16_VECTOR) for place in places]
        for i, column in enumerate(_interleave(builder, *numbers)):
            column = builder.bitcast(column, I32_VECTOR)
            for word, row in zip(words, totals, strict=True):
                before = builder.load(row[first + i])
                after = add_pair_products(context, builder, before, word, column)
                builder.store(after, row[first + i])


def _weigh_pairs_in_place(rows: int) -> Any:
    """Generate the kernel for ``rows`` rows of weights, and values of 64 dimensions."""

    @generated(types.void, OWN, INDEX, INDEX, OWN, INDEX, INDEX, INDEX, INDEX, OWN, OWN, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute out[rows, 64] = weights[rows, first:end] times pairs of V, dim to dim + 64.

        Args:
            weights: float32, words, rows weights_stride apart; pair ``first`` is at weights_at.
            values: a KVSpan of bfloat16; pairs as of ``pack_values``.
            ahead: a KVSpan whose entries of the same numbers are prefetched.
            out: float32, rows head_dim apart, from out_at on.
        """
        weights, at, stride, values, first, end, head_dim, dim, ahead, out, to = arguments
        span = SpanCode(context, builder, kinds[3], values, head_dim)
        prefetched = SpanCode(context, builder, kinds[8], ahead, head_dim)
        start = address(context, builder, kinds[0], weights, at)
        weight_rows = row_pointers(builder, start, stride, rows)
        totals = Sums(builder, rows, WIDE // LANES)
        with cgutils.for_range(builder, end, start=first, intp=I64) as loop:
            entry = builder.mul(loop.index, integer(2))
            prefetched.prefetch(entry, 2)
            pair = _pair_of(builder, span, entry, dim)
            place = builder.sub(loop.index, first)
            words = [_broadcast_word(builder, row, place) for row in weight_rows]
            _add_value_pair(context, builder, pair, words, totals.places)
        start = address(context, builder, kinds[9], out, to)
        totals.write(row_pointers(builder, start, head_dim, rows))

    return operation


weigh_pairs_in_place = kernel_by_number(
    {rows: _weigh_pairs_in_place(rows) for rows in (3, 1, 2, 4, 5, 6)}
)
