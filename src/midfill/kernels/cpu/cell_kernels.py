"""Attention's inner loops over KV cells: scores of 16 keys, and sums of weighted values.

Lanes of a score run over head_dim: a query times a key is 16 partial sums over d, d + 16, ... in
order, added up as a tree. Values are summed key after key. Each query row has its own sums, so a
row's result is the same bit for bit whatever other rows a call does.

Keys and values are read where they lie, in any precision of cells.py, in any order of slots.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from midfill.kernels.cpu.cells import cell_address, load_cell_vector
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I8,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Codegen,
    address,
    broadcast,
    constant,
    fused_multiply_add,
    llvm_call,
    load_unaligned,
    store_unaligned,
)

MAX_CELL_ROWS = 4
"""Most rows that one call of the kernels here does."""
_LINE = 64


def _integer(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _fold(builder: ir.IRBuilder, a: Any, b: Any, width: int) -> Any:
    """Add lanes i and i ^ width of two vectors: a's sums where i & width is 0, b's elsewhere."""
    kept = [i if i & width == 0 else LANES + i for i in range(LANES)]
    moved = [i ^ width if i & width == 0 else LANES + (i ^ width) for i in range(LANES)]
    first = builder.shuffle_vector(a, b, ir.Constant(I32_VECTOR, kept))
    second = builder.shuffle_vector(a, b, ir.Constant(I32_VECTOR, moved))
    return builder.fadd(first, second)


def _fold_four(builder: ir.IRBuilder, four: Sequence[Any], width: int) -> Any:
    """Two rounds of ``_fold``: of width * 2 and of width; result lane i is vector
    (i & 2 * width) // (2 * width) + 2 * ((i & width) // width)'s."""
    low = _fold(builder, four[0], four[1], width * 2)
    high = _fold(builder, four[2], four[3], width * 2)
    return _fold(builder, low, high, width)


def _in_order(builder: ir.IRBuilder, sums: Any) -> Any:
    """Put the 16 sums of four times four vectors, folded by 4 and then by 1, in their order."""

    def lane(key: int) -> int:
        outer, inner = divmod(key, 4)
        return 8 * (inner & 1) + 4 * (inner >> 1) + 2 * (outer & 1) + (outer >> 1)

    order = ir.Constant(I32_VECTOR, [lane(key) for key in range(LANES)])
    return builder.shuffle_vector(sums, sums, order)


class _Sums:
    """rows x columns running sums that LLVM keeps in registers."""

    def __init__(self, builder: ir.IRBuilder, rows: int, columns: int) -> None:
        self._builder = builder
        self._cells = [
            [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(columns)]
            for _ in range(rows)
        ]
        for r in range(rows):
            for column in range(columns):
                self.start(r, column, constant(0.0))

    def start(self, row: int, column: int, value: Any) -> None:
        self._builder.store(value, self._cells[row][column])

    def add(self, row: int, column: int, a: Any, b: Any) -> None:
        builder, cell = self._builder, self._cells[row][column]
        builder.store(fused_multiply_add(builder, a, b, builder.load(cell)), cell)

    def row(self, row: int) -> list[Any]:
        return [self._builder.load(cell) for cell in self._cells[row]]


def _score_keys(rows: int) -> Any:
    """Generate the kernel of ``rows`` query rows."""

    def operation(
        typing_context: Any,
        queries: Any,
        queries_at: Any,
        head_dim: Any,
        cells: Any,
        base: Any,
        slots: Any,
        first: Any,
        count: Any,
        scores: Any,
        scores_at: Any,
        scores_stride: Any,
    ) -> tuple[Any, Codegen]:
        """scores[r, 0:16] = queries[r] times the keys of slots[first:first + 16].

        queries: float32 [rows, head_dim] at queries_at. cells: of one head, cell of slot 0 at
        base. From key ``count`` on, scores are of no meaning.
        """

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            queries, queries_at, dim, cells, base, slots, first, count, scores, at, row_stride = (
                arguments
            )
            kinds = signature.args
            start = address(context, builder, kinds[0], queries, queries_at)
            query_rows = [builder.gep(start, [builder.mul(dim, _integer(r))]) for r in range(rows)]
            chunks = builder.sdiv(dim, _integer(LANES))
            partial = cgutils.alloca_once(builder, F32_VECTOR, 4 * rows)
            for i in range(4 * rows):
                builder.store(constant(0.0), builder.gep(partial, [_integer(i)]))
            last = builder.sub(count, _integer(1))
            full = builder.icmp_signed(">", count, _integer(LANES))
            wanted = builder.select(full, _integer(LANES), count)
            # Four keys at a time, in order, which is what prefetchers follow. The number of
            # rounds is not a constant, or LLVM would merge them and run out of registers.
            rounds = builder.sdiv(builder.add(wanted, _integer(3)), _integer(4))
            with cgutils.for_range(builder, rounds, intp=I64) as four:
                keys = []
                for column in range(4):
                    key = builder.add(builder.mul(four.index, _integer(4)), _integer(column))
                    inside = builder.icmp_signed("<", key, last)
                    index = builder.add(first, builder.select(inside, key, last))
                    keys.append(
                        cell_address(
                            context, builder, (kinds[3], kinds[5]), (cells, base), (slots, index),
                            dim,
                        )
                    )  # fmt: skip
                sums = _Sums(builder, rows, 4)
                with cgutils.for_range(builder, chunks, intp=I64) as loop:
                    d = builder.mul(loop.index, _integer(LANES))
                    values = [
                        load_unaligned(builder, builder.gep(row, [d]), F32_VECTOR)
                        for row in query_rows
                    ]
                    for column in range(4):
                        pointer = builder.gep(keys[column], [d])
                        key = load_cell_vector(context, builder, kinds[3], pointer)
                        for r in range(rows):
                            sums.add(r, column, values[r], key)
                for r in range(rows):
                    at_round = builder.add(four.index, _integer(4 * r))
                    folded = _fold_four(builder, sums.row(r), 4)
                    builder.store(folded, builder.gep(partial, [at_round]))
            for r in range(rows):
                folded = [
                    builder.load(builder.gep(partial, [_integer(4 * r + i)])) for i in range(4)
                ]
                target = builder.add(at, builder.mul(row_stride, _integer(r)))
                pointer = address(context, builder, kinds[8], scores, target)
                result = _in_order(builder, _fold_four(builder, folded, 1))
                store_unaligned(builder, result, pointer)
            return context.get_dummy_value()

        index = types.intp
        signature = types.void(
            queries, index, index, cells, index, slots, index, index, scores, index, index
        )
        return signature, codegen

    return intrinsic(operation)


def _add_values(rows: int, vectors: int) -> Any:
    """Generate the kernel of ``rows`` rows of weights and ``vectors`` * 16 dimensions."""

    def operation(
        typing_context: Any,
        weights: Any,
        weights_at: Any,
        weights_stride: Any,
        cells: Any,
        base: Any,
        slots: Any,
        first: Any,
        count: Any,
        head_dim: Any,
        sums: Any,
        sums_at: Any,
    ) -> tuple[Any, Codegen]:
        """sums[r, :width] += weights[r, 0:count] @ V[slots[first:first + count], :width].

        weights: float32, rows weights_stride apart. cells: of one head, the wanted part of slot
        0's cell at base. sums: float32, rows head_dim apart.
        """

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, weights_at, stride, cells, base, slots, first, count, dim, sums, at = arguments
            kinds = signature.args
            start = address(context, builder, kinds[0], weights, weights_at)
            rows_of_weights = [
                builder.gep(start, [builder.mul(stride, _integer(r))]) for r in range(rows)
            ]
            totals = _Sums(builder, rows, vectors)
            targets = [
                [
                    address(
                        context, builder, kinds[9], sums,
                        builder.add(at, builder.add(builder.mul(dim, _integer(r)), _integer(v))),
                    )
                    for v in range(0, vectors * LANES, LANES)
                ]
                for r in range(rows)
            ]  # fmt: skip
            for r in range(rows):
                for v in range(vectors):
                    totals.start(r, v, load_unaligned(builder, targets[r][v], F32_VECTOR))
            with cgutils.for_range(builder, count, intp=I64) as loop:
                index = builder.add(first, loop.index)
                cell = cell_address(
                    context, builder, (kinds[3], kinds[5]), (cells, base), (slots, index), dim
                )
                values = [
                    load_cell_vector(
                        context, builder, kinds[3], builder.gep(cell, [_integer(v * LANES)])
                    )
                    for v in range(vectors)
                ]
                for r in range(rows):
                    weight = builder.load(builder.gep(rows_of_weights[r], [loop.index]))
                    for v in range(vectors):
                        totals.add(r, v, broadcast(builder, weight), values[v])
            for r in range(rows):
                for v, total in enumerate(totals.row(r)):
                    store_unaligned(builder, total, targets[r][v])
            return context.get_dummy_value()

        index = types.intp
        signature = types.void(
            weights, index, index, cells, index, slots, index, index, index, sums, index
        )
        return signature, codegen

    return intrinsic(operation)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_cell(
    typing_context: Any, cells: Any, offset: Any, head_dim: Any
) -> tuple[Any, Codegen]:
    """Ask for cells[offset:offset + head_dim] to be brought into the cache."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        size = kind.dtype.bitwidth // 8
        start = address(context, builder, kind, arguments[0], arguments[1])
        pointer = builder.bitcast(start, I8.as_pointer())
        count = builder.mul(arguments[2], _integer(size))
        lines = builder.sdiv(builder.add(count, _integer(_LINE - 1)), _integer(_LINE))
        with cgutils.for_range(builder, lines, intp=I64) as loop:
            line = builder.gep(pointer, [builder.mul(loop.index, _integer(_LINE))])
            hints = [ir.Constant(I32, hint) for hint in (0, 3, 1)]  # read, keep, data
            llvm_call(builder, "llvm.prefetch.p0", [line, *hints], ir.VoidType())
        return context.get_dummy_value()

    return types.void(cells, types.intp, types.intp), codegen


score_keys_1 = _score_keys(1)
score_keys_2 = _score_keys(2)
score_keys_3 = _score_keys(3)
score_keys_4 = _score_keys(4)
add_values_1x32 = _add_values(1, 2)
add_values_2x32 = _add_values(2, 2)
add_values_3x32 = _add_values(3, 2)
add_values_4x32 = _add_values(4, 2)
add_values_1x64 = _add_values(1, 4)
add_values_2x64 = _add_values(2, 4)
add_values_3x64 = _add_values(3, 4)
add_values_4x64 = _add_values(4, 4)
