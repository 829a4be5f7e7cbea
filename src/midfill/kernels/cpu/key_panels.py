"""Scores of many query rows: panels of 16 transposed keys, so that vector lanes are keys.

Where keys are read in place, lanes run over head_dim, and the 16 partial sums of each score are
added across lanes (kv_products.py). For many rows that costs as much as the products themselves.
Here the 16 keys of a panel are transposed once, to float32 [head_dim, 16]. A partial sum is then a
vector of its own, and all are added without moving a lane. Products and sums are the same, in the
same order: a score has the same bits either way.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import kernel_by_number
from midfill.kernels.cpu.kv_spans import SpanCode
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
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
    opaque,
    register_vectors,
    row_pointers,
    store_unaligned,
)

_LEAVES = 4
"""Partial sums of a score that are added without a loop."""


def _interleave(builder: ir.IRBuilder, a: Any, b: Any, width: int) -> tuple[Any, Any]:
    """Exchange the odd runs of ``width`` lanes of a with the even ones of b."""
    low = [i if i & width == 0 else LANES + (i ^ width) for i in range(LANES)]
    high = [i ^ width if i & width == 0 else LANES + i for i in range(LANES)]
    return (
        builder.shuffle_vector(a, b, ir.Constant(I32_VECTOR, low)),
        builder.shuffle_vector(a, b, ir.Constant(I32_VECTOR, high)),
    )


def transpose(builder: ir.IRBuilder, rows: Sequence[Any]) -> list[Any]:
    """Return the columns of a 16 x 16 matrix, given its rows."""
    matrix = list(rows)
    for width in (1, 2, 4, 8):
        for i in range(LANES):
            if i & width == 0:
                pair = _interleave(builder, matrix[i], matrix[i | width], width)
                matrix[i], matrix[i | width] = pair
    return matrix


@generated(types.void, OWN, INDEX, INDEX, OWN, OWN)
def transpose_keys(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Transpose 16 keys of a span, from number ``key`` on, to panel[head_dim, 16] in float32.

    Beyond the span's end, its last key is repeated. Entries of the same numbers are prefetched
    from the span ``ahead``.
    """
    keys, key, dim, ahead, panel = arguments
    span = SpanCode(context, builder, kinds[0], keys, dim)
    prefetched = SpanCode(context, builder, kinds[3], ahead, dim)
    start = address(context, builder, kinds[4], panel, integer(0))
    entries = [span.entry(builder.add(key, integer(i))) for i in range(LANES)]
    for i in range(0, LANES, 4):
        prefetched.prefetch(builder.add(key, integer(i)), 4)
    chunks = builder.sdiv(dim, integer(LANES))
    with cgutils.for_range(builder, chunks, intp=I64) as chunk:
        d = builder.mul(chunk.index, integer(LANES))
        columns = transpose(builder, [span.load(entry, d) for entry in entries])
        target = builder.gep(start, [builder.mul(d, integer(LANES))])
        for i, column in enumerate(columns):
            store_unaligned(builder, column, builder.gep(target, [integer(i * LANES)]))


class _PanelScores:
    """Generator of the scores of some query rows with one panel."""

    def __init__(
        self, context: Any, builder: ir.IRBuilder, query_rows: Sequence[Any], panel: Any, dim: Any
    ) -> None:
        self._builder, self._query_rows, self._panel = builder, query_rows, panel
        self._chunks = builder.sdiv(dim, integer(LANES))
        # Two, but not a constant: LLVM would unroll the loops, move the additions to the end and
        # keep far more sums than there are registers.
        self._two = builder.select(builder.icmp_signed(">", dim, integer(0)), integer(2), dim)
        self._sums = [Sums(builder, len(query_rows), 1) for _ in range(_LEAVES)]
        self._in_registers = _LEAVES * len(query_rows) < register_vectors(context)
        vectors = ir.ArrayType(F32_VECTOR, len(query_rows))
        self._waiting = [
            opaque(builder, cgutils.alloca_once(builder, vectors))
            for _ in range(0 if self._in_registers else 2)
        ]

    def scores(self) -> list[Any]:
        """Return a vector per row: the partial sums of d, d + 16, ..., added as a tree over d."""
        return self._tree(integer(0), 1)

    def _tree(self, lane: Any, step: int) -> list[Any]:
        """Sum over lanes lane, lane + step, ...: even ones first, then odd ones."""
        if step * _LEAVES == LANES:
            return self._leaves(lane)
        builder = self._builder
        # -0 and not 0: adding to it changes nothing, not even a -0.
        totals = [cgutils.alloca_once_value(builder, constant(-0.0)) for _ in self._query_rows]
        for total in totals:
            builder.store(constant(-0.0), total)
        with cgutils.for_range(builder, self._two, intp=I64) as half:
            first = builder.add(lane, builder.mul(half.index, integer(step)))
            for total, part in zip(totals, self._tree(first, 2 * step), strict=True):
                builder.store(builder.fadd(builder.load(total), part), total)
        return [builder.load(total) for total in totals]

    def _leaves(self, lane: Any) -> list[Any]:
        """Compute the tree's last levels, without further loops."""
        if not self._in_registers:
            return self._leaves_one_by_one(lane, range(_LEAVES))
        self._sum_products(lane, range(_LEAVES))
        return [
            _add_tree(self._builder, [sums.row(r)[0] for sums in self._sums])
            for r in range(len(self._query_rows))
        ]

    def _leaves_one_by_one(self, lane: Any, leaves: Sequence[int]) -> list[Any]:
        """Compute one leaf after the other; the sum of the even ones waits in memory.

        LLVM would keep it in registers, and what is summed meanwhile in memory.
        """
        if len(leaves) == 1:
            self._sum_products(lane, leaves)
            return [row[0] for row in map(self._sums[leaves[0]].row, range(len(self._query_rows)))]
        builder, place = self._builder, self._waiting[len(leaves) // 4]
        for r, value in enumerate(self._leaves_one_by_one(lane, leaves[::2])):
            builder.store(value, builder.gep(place, [integer(0), I32(r)]))
        return [
            builder.fadd(builder.load(builder.gep(place, [integer(0), I32(r)])), value)
            for r, value in enumerate(self._leaves_one_by_one(lane, leaves[1::2]))
        ]

    def _sum_products(self, lane: Any, leaves: Sequence[int]) -> None:
        """Compute the partial sums of some leaves."""
        builder, step = self._builder, LANES // _LEAVES
        for i in leaves:
            self._sums[i].clear()
        with cgutils.for_range(builder, self._chunks, intp=I64) as chunk:
            start = builder.add(builder.mul(chunk.index, integer(LANES)), lane)
            for i in leaves:
                d = builder.add(start, integer(i * step))
                at = builder.gep(self._panel, [builder.mul(d, integer(LANES))])
                keys = load_unaligned(builder, at, F32_VECTOR)
                for r, row in enumerate(self._query_rows):
                    query = broadcast(builder, builder.load(builder.gep(row, [d])))
                    self._sums[i].add(r, 0, query, keys)


def _add_tree(builder: ir.IRBuilder, terms: Sequence[Any]) -> Any:
    """Add the sum of the even terms and the sum of the odd ones."""
    if len(terms) == 1:
        return terms[0]
    return builder.fadd(_add_tree(builder, terms[::2]), _add_tree(builder, terms[1::2]))


def _score_panel(rows: int) -> Callable[..., None]:
    """Generate the kernel for ``rows`` query rows."""

    @generated(types.void, OWN, INDEX, INDEX, OWN, OWN, INDEX, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute scores[r, 0:16] = queries[r] times the 16 keys of a panel.

        Args:
            queries: float32, [rows, head_dim] at queries_at.
            panel: float32 [head_dim * 16].
            scores: float32, rows scores_stride apart, from scores_at on.
        """
        queries, queries_at, dim, panel, scores, scores_at, stride = arguments
        start = address(context, builder, kinds[0], queries, queries_at)
        query_rows = row_pointers(builder, start, dim, rows)
        keys = address(context, builder, kinds[3], panel, integer(0))
        results = _PanelScores(context, builder, query_rows, keys, dim).scores()
        start = address(context, builder, kinds[4], scores, scores_at)
        targets = row_pointers(builder, start, stride, rows)
        for result, target in zip(results, targets, strict=True):
            store_unaligned(builder, result, target)

    return operation


score_panel = kernel_by_number({rows: _score_panel(rows) for rows in (4, 3, 5)})
