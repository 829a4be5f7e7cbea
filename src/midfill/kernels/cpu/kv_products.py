"""Attention's inner loops over KV entries where they lie: scores of 16 keys, and weighted values.

Lanes of a score run over head_dim: a query times a key is 16 partial sums over d, d + 16, ... in
order, which are added as a tree. Values are summed key after key. Each query row has sums of its
own, so a row has the same bits whatever other rows a call computes.

Keys and values are in any format of kv_cache.py, in any order of slots.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import kernel_by_number
from midfill.kernels.cpu.kv_spans import SpanCode
from midfill.kernels.cpu.simd import (
    F32,
    F32_VECTOR,
    I32,
    I64,
    LANES,
    Sums,
    address,
    broadcast,
    integer,
    load_unaligned,
    register_vectors,
    row_pointers,
    store_unaligned,
)

_EIGHT = ir.VectorType(F32, 8)


def _halves(builder: ir.IRBuilder, value: Any, count: int) -> tuple[Any, Any]:
    """Split a vector of ``count`` lanes into its first and its last half."""
    half = count // 2
    low, high = (
        builder.shuffle_vector(value, value, _lanes(range(start, start + half)))
        for start in (0, half)
    )
    return low, high


def _lanes(lanes: Iterable[int]) -> ir.Constant:
    chosen = list(lanes)
    return ir.Constant(ir.VectorType(I32, len(chosen)), chosen)


def fold(builder: ir.IRBuilder, a: Any, b: Any, width: int) -> Any:
    """Add lanes i and i + width of both vectors of 8, in runs of 2 * width lanes.

    A run of the result is ``width`` sums of a's run and then as many of b's; where a run is all
    there is (width 4), they are those of a whole vector.
    """
    first: list[int] = []
    second: list[int] = []
    for run in range(0, 8, 2 * width) if width < 4 else (0,):
        for start in (run, 8 + run):
            first += range(start, start + width)
            second += range(start + width, start + 2 * width)
    add = builder.fadd if a.type.element == F32 else builder.add
    return add(
        builder.shuffle_vector(a, b, _lanes(first)), builder.shuffle_vector(a, b, _lanes(second))
    )


def _fold_keys(builder: ir.IRBuilder, sums: Sequence[Any]) -> Any:
    """Add the partial sums of two keys up to four per key, in one vector of 8.

    Lanes i and i + 8 are added, then i and i + 4.
    """
    first, second = (builder.fadd(*_halves(builder, vector, LANES)) for vector in sums)
    return fold(builder, first, second, 4)


def fold_sixteen(builder: ir.IRBuilder, fours: Sequence[Any]) -> Any:
    """Return the sums of 16 keys, in order, from two sums each of four keys in four vectors of 8.

    Those of a vector are of keys 0, 2, 1, 3, as ``fold`` leaves them.
    """
    low, high = (fold(builder, fours[i], fours[i + 1], 1) for i in (0, 2))
    keys = (0, 4, 2, 6, 1, 5, 3, 7)  # of ``low``, as they come out; 8 more in ``high``
    order = [8 * (key // 8) + keys.index(key % 8) for key in range(LANES)]
    return builder.shuffle_vector(low, high, _lanes(order))


def _four_keys(
    context: Any, builder: ir.IRBuilder, query_rows: Sequence[Any], keys: SpanCode, index: Any,
    chunks: Any,
) -> list[Any]:  # fmt: skip
    """Return, per row, two partial sums of each of the four keys from ``index`` on.

    In a vector of 8, they are those of keys 0, 2, 1, 3 in this order.
    """
    rows = len(query_rows)
    together = 4 if 4 * rows < register_vectors(context) else 2
    folded: list[list[Any]] = [[] for _ in range(rows)]
    for first in range(0, 4, together):
        sums = Sums(builder, rows, together)
        pointers = [
            keys.entry(builder.add(index, integer(first + column))) for column in range(together)
        ]
        with cgutils.for_range(builder, chunks, intp=I64) as chunk:
            d = builder.mul(chunk.index, integer(LANES))
            values = [
                load_unaligned(builder, builder.gep(row, [d]), F32_VECTOR) for row in query_rows
            ]
            for column, pointer in enumerate(pointers):
                key = keys.load(pointer, d)
                for r, value in enumerate(values):
                    sums.add(r, column, value, key)
        for r, pairs in enumerate(folded):
            row = sums.row(r)
            pairs += [_fold_keys(builder, row[i : i + 2]) for i in range(0, together, 2)]
    return [fold(builder, low, high, 2) for low, high in folded]


def _score_keys(rows: int) -> Any:
    """Generate the kernel for ``rows`` query rows."""

    @generated(types.void, OWN, INDEX, INDEX, OWN, INDEX, OWN, OWN, INDEX, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute scores[r, 0:16] = queries[r] times 16 keys of a span, from number ``key`` on.

        Args:
            queries: float32, [rows, head_dim] at queries_at.
            keys: a KVSpan.
            ahead: a KVSpan whose entries of the same numbers are prefetched.
            scores: float32, rows scores_stride apart, from scores_at on; meaningless beyond the
                span's end.
        """
        queries, queries_at, dim, keys, key, ahead, scores, at, stride = arguments
        span = SpanCode(context, builder, kinds[3], keys, dim)
        prefetched = SpanCode(context, builder, kinds[5], ahead, dim)
        start = address(context, builder, kinds[0], queries, queries_at)
        query_rows = row_pointers(builder, start, dim, rows)
        chunks = builder.sdiv(dim, integer(LANES))
        folded = cgutils.alloca_once(builder, _EIGHT, 4 * rows)
        left = builder.sub(span.length, key)
        full = builder.icmp_signed(">", left, integer(LANES))
        wanted = builder.select(full, integer(LANES), left)
        # Four keys at a time, in order, which is what prefetchers follow. The number of
        # rounds is not a constant, or LLVM would merge them and run out of registers.
        rounds = builder.sdiv(builder.add(wanted, integer(3)), integer(4))
        with cgutils.for_range(builder, rounds, intp=I64) as four:
            index = builder.add(key, builder.mul(four.index, integer(4)))
            prefetched.prefetch(index, 4)
            for r, sums in enumerate(_four_keys(context, builder, query_rows, span, index, chunks)):
                place = builder.gep(folded, [builder.add(four.index, integer(4 * r))])
                builder.store(sums, place)
        start = address(context, builder, kinds[6], scores, at)
        for r, target in enumerate(row_pointers(builder, start, stride, rows)):
            four = [builder.load(builder.gep(folded, [integer(4 * r + i)])) for i in range(4)]
            store_unaligned(builder, fold_sixteen(builder, four), target)

    return operation


def _weigh_values(rows: int, vectors: int) -> Any:
    """Generate the kernel for ``rows`` rows of weights and ``vectors`` * 16 dimensions."""

    @generated(types.void, OWN, INDEX, INDEX, OWN, INDEX, INDEX, INDEX, INDEX, OWN, OWN, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute sums[r, :width] = weights[r, first:end] @ V[first:end, dim:dim + width].

        Args:
            weights: float32, rows weights_stride apart, from weights_at on.
            values: a KVSpan, V.
            ahead: a KVSpan whose entries first to end are prefetched.
            sums: float32, rows head_dim apart, from sums_at on.
        """
        weights, at, stride, values, first, end, head_dim, dim, ahead, sums, to = arguments
        span = SpanCode(context, builder, kinds[3], values, head_dim)
        prefetched = SpanCode(context, builder, kinds[8], ahead, head_dim)
        start = address(context, builder, kinds[0], weights, at)
        weight_rows = row_pointers(builder, start, stride, rows)
        start = address(context, builder, kinds[9], sums, to)
        targets = row_pointers(builder, start, head_dim, rows)
        # As many dimensions at a time as there are registers for.
        together = next(n for n in (4, 2, 1) if 8 * rows * n <= 5 * register_vectors(context))
        for part in range(0, vectors, together):
            width = min(together, vectors - part)
            totals = Sums(builder, rows, width)
            with cgutils.for_range(builder, end, start=first, intp=I64) as loop:
                if part == 0:
                    prefetched.prefetch(loop.index, 1)
                entry = span.entry(loop.index)
                places = [builder.add(dim, integer((part + v) * LANES)) for v in range(width)]
                loaded = [span.load(entry, place) for place in places]
                for r, row in enumerate(weight_rows):
                    weight = broadcast(builder, builder.load(builder.gep(row, [loop.index])))
                    for v, value in enumerate(loaded):
                        totals.add(r, v, weight, value)
            totals.write([builder.gep(target, [integer(part * LANES)]) for target in targets])

    return operation


score_keys = kernel_by_number({rows: _score_keys(rows) for rows in (4, 3, 2, 1)})
weigh_values_wide, weigh_values_narrow = (
    kernel_by_number({rows: _weigh_values(rows, vectors) for rows in (4, 3, 5, 2, 1)})
    for vectors in (4, 2)
)
