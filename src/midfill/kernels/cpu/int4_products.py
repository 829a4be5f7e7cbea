"""4-bit entries of a KV cache times int8: scores of 16 keys, and weighted values.

An operand is a *block* of float32 words: its quants, int8, then its scale, then PACKED_ZERO times
minus the sum of its quants, int32. A query is a block, and so are the weights that a
row gives 32 keys.

Products are summed as integers, which is exact, so a row has the same bits whatever other rows a
call computes, and on every chip, whichever instruction sums them (dots.py). Entries are unpacked 32
numbers at a time to bytes 0..15, whose order is that of ``ENTRY_ORDER``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.dots import (
    add_products,
    multiply_add_words,
    multiply_pairs,
    pairs_in_int16,
)
from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import kernel_by_number
from midfill.kernels.cpu.kv_cache import PACKED_ZERO
from midfill.kernels.cpu.kv_products import fold, fold_sixteen
from midfill.kernels.cpu.kv_spans import SpanCode
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I8,
    I16,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Sums,
    address,
    broadcast,
    f32x16,
    for_known,
    integer,
    llvm_call,
    load_unaligned,
    register_vectors,
    row_pointers,
    store_unaligned,
    tree_reduce,
)

UNIT = 32
"""Numbers of an entry that are unpacked at a time, and keys whose weights share a scale.

As many products of weights with quants -8..7 fit 16 bits, summed.
"""
_UNIT_WORDS = UNIT // 4
_BYTES = ir.VectorType(I8, UNIT)
_WORDS = ir.VectorType(I32, _UNIT_WORDS)
_HALVES = ir.VectorType(I16, UNIT // 2)
_BITS = 4
_KNOWN_DIMS = (64, 128)
"""Head dimensions that code is generated for."""
ENTRY_ORDER = tuple(8 * part + lane for part in (0, 2, 1, 3) for lane in range(8))
"""Which of 32 numbers each byte of an unpacked unit is."""


def _constant(kind: ir.VectorType, values: Sequence[int]) -> ir.Constant:
    return ir.Constant(kind, list(values))


def _shuffle(builder: ir.IRBuilder, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, _constant(ir.VectorType(I32, len(lanes)), lanes))


@generated(types.intp, OWN, INDEX, types.boolean, f32x16, f32x16)
def store_quants(context: Any, builder: Any, kinds: Any, *arguments: Any) -> Any:
    """Round 32 numbers -127..127 to int8, store them in a float32 array, and return their sum.

    Args:
        array: float32.
        word: the first of 8 words that they go to.
        is_entry: whether they are stored in ENTRY_ORDER, or one after the other.
        first, second: the numbers.
    """
    array, word, is_entry, *numbers = arguments
    whole = [llvm_call(builder, "llvm.rint.v16f32", [each], F32_VECTOR) for each in numbers]
    low, high = (builder.fptosi(each, I32_VECTOR) for each in whole)
    total = tree_reduce(builder, builder.add(low, high), builder.add)
    ordered = [_shuffle(builder, low, high, order) for order in (ENTRY_ORDER, range(UNIT))]
    packed = builder.trunc(builder.select(is_entry, *ordered), _BYTES)
    store_unaligned(builder, packed, address(context, builder, kinds[0], array, word))
    return builder.sext(total, I64)


@generated(types.void, OWN, INDEX, types.float32, INDEX)
def store_block_end(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Store what follows a block's quants at array[word:word + 2]: their scale, and their sum."""
    array, word, scale, total = arguments
    pointer = address(context, builder, kinds[0], array, word)
    builder.store(scale, pointer)
    offset = builder.trunc(builder.mul(total, integer(-PACKED_ZERO)), I32)
    after = builder.gep(pointer, [integer(1)])
    builder.store(offset, builder.bitcast(after, I32.as_pointer()))


def _unpack(builder: ir.IRBuilder, pointer: Any) -> Any:
    """Load 32 numbers of an entry, as bytes 0..15."""
    half = ir.VectorType(I32, _UNIT_WORDS // 2)
    packed = load_unaligned(builder, pointer, half)
    both = _shuffle(builder, packed, packed, list(range(half.count)) * 2)
    places = _constant(_WORDS, [0] * half.count + [_BITS] * half.count)
    low = _constant(_WORDS, [0x0F0F0F0F] * _UNIT_WORDS)
    return builder.and_(builder.lshr(both, places), low)


def _load_float(builder: ir.IRBuilder, block: Any, word: Any) -> Any:
    """Load a float32 of a block."""
    return builder.load(builder.gep(block, [word]))


def _load_integer(builder: ir.IRBuilder, block: Any, word: Any) -> Any:
    """Load an int32 of a block."""
    return builder.load(builder.bitcast(builder.gep(block, [word]), I32.as_pointer()))


class _KeySums:
    """Running sums of the products of some rows with some keys: 8 int32 each."""

    def __init__(self, context: Any, builder: ir.IRBuilder, rows: int, keys: int) -> None:
        self._context, self._builder = context, builder
        self._has_pairs = pairs_in_int16(context, _BITS) > 0
        self._zero = _constant(_WORDS, [0] * _UNIT_WORDS)
        self._sums = [
            [cgutils.alloca_once_value(builder, self._zero) for _ in range(rows)]
            for _ in range(keys)
        ]

    def clear(self) -> None:
        """Set all sums to 0."""
        for row in self._sums:
            for place in row:
                self._builder.store(self._zero, place)

    def add_units(self, units: Any, keys: Sequence[Any], queries: Sequence[Any]) -> None:
        """Add the products of all units, two at a time.

        Args:
            units: how many there are.
            keys: pointers to entries.
            queries: pointers to blocks.
        """
        builder = self._builder
        with cgutils.for_range(builder, builder.sdiv(units, integer(2)), intp=I64) as two:
            self._add(builder.mul(two.index, integer(2)), 2, keys, queries)
        last = builder.sub(units, integer(1))
        is_odd = builder.icmp_signed("==", builder.and_(units, integer(1)), integer(1))
        with builder.if_then(is_odd, likely=False):
            self._add(last, 1, keys, queries)

    def _add(self, first: Any, count: int, keys: Sequence[Any], queries: Sequence[Any]) -> None:
        """Add the products of one or two units from number ``first`` on."""
        builder = self._builder
        units = [builder.add(first, integer(i)) for i in range(count)]
        packed = [builder.mul(unit, integer(UNIT // 2)) for unit in units]
        words = [builder.mul(unit, integer(_UNIT_WORDS)) for unit in units]
        for key, sums in zip(keys, self._sums, strict=True):
            entry = [_unpack(builder, builder.gep(key, [at])) for at in packed]
            for query, place in zip(queries, sums, strict=True):
                row = [load_unaligned(builder, builder.gep(query, [at]), _WORDS) for at in words]
                builder.store(self._add_products(builder.load(place), entry, row), place)

    def _add_products(self, total: Any, entry: Sequence[Any], row: Sequence[Any]) -> Any:
        """Return a sum and the products of units."""
        context, builder = self._context, self._builder
        if not self._has_pairs:
            for unit, numbers in zip(entry, row, strict=True):
                total = add_products(context, builder, total, unit, numbers)
            return total
        pairs = [multiply_pairs(context, builder, *each) for each in zip(entry, row, strict=True)]
        both = builder.add(*pairs) if len(pairs) > 1 else pairs[0]
        ones = _constant(_HALVES, [1] * _HALVES.count)
        return builder.add(total, multiply_add_words(context, builder, both, ones))

    def row(self, row: int) -> list[Any]:
        """Return the sums of a row, by key."""
        return [self._builder.load(key[row]) for key in self._sums]


def _four_keys(
    context: Any, builder: ir.IRBuilder, queries: Sequence[Any], keys: SpanCode, index: Any,
    units: Any,
) -> list[Any]:  # fmt: skip
    """Return, per row, two sums each of the four keys from ``index`` on, see ``fold_sixteen``."""
    rows = len(queries)
    together = 4 if 4 * rows <= _sum_registers(context) else 2
    sums = _KeySums(context, builder, rows, together)
    folded: list[list[Any]] = [[] for _ in range(rows)]
    for first in range(0, 4, together):
        sums.clear()
        entries = [keys.entry(builder.add(index, integer(first + i))) for i in range(together)]
        sums.add_units(units, entries, queries)
        for r, pairs in enumerate(folded):
            row = sums.row(r)
            pairs += [fold(builder, row[i], row[i + 1], 4) for i in range(0, together, 2)]
    return [fold(builder, low, high, 2) for low, high in folded]


def _score_int4(rows: int) -> Any:
    """Generate the kernel for ``rows`` query rows."""

    @generated(types.void, OWN, INDEX, INDEX, OWN, INDEX, OWN, OWN, INDEX, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute scores[r, 0:16] = queries[r] times 16 keys of a span, from number ``key`` on.

        Args:
            queries: float32, blocks of head_dim quants, head_dim words apart, from queries_at on.
            keys: a KVSpan of 4-bit entries; scores are without their scales.
            ahead: a KVSpan whose entries of the same numbers are prefetched.
            scores: float32, rows scores_stride apart, from scores_at on; meaningless beyond the
                span's end.
        """
        queries, queries_at, dim, keys, key, ahead, scores, at, stride = arguments

        def generate(dim: Any) -> None:
            span = SpanCode(context, builder, kinds[3], keys, dim)
            prefetched = SpanCode(context, builder, kinds[5], ahead, dim)
            start = address(context, builder, kinds[0], queries, queries_at)
            blocks = row_pointers(builder, start, dim, rows)
            units = builder.sdiv(dim, integer(UNIT))
            folded = cgutils.alloca_once(builder, _WORDS, 4 * rows)
            left = builder.sub(span.length, key)
            full = builder.icmp_signed(">", left, integer(LANES))
            wanted = builder.select(full, integer(LANES), left)
            rounds = builder.sdiv(builder.add(wanted, integer(3)), integer(4))
            with cgutils.for_range(builder, rounds, intp=I64) as four:
                index = builder.add(key, builder.mul(four.index, integer(4)))
                prefetched.prefetch(index, 4)
                for r, sums in enumerate(_four_keys(context, builder, blocks, span, index, units)):
                    place = builder.gep(folded, [builder.add(four.index, integer(4 * r))])
                    builder.store(sums, place)
            start = address(context, builder, kinds[6], scores, at)
            scale_at = builder.sdiv(dim, integer(4))
            for r, target in enumerate(row_pointers(builder, start, stride, rows)):
                four = [builder.load(builder.gep(folded, [integer(4 * r + i)])) for i in range(4)]
                offset = _load_integer(builder, blocks[r], builder.add(scale_at, integer(1)))
                sums = builder.add(fold_sixteen(builder, four), broadcast(builder, offset))
                scale = broadcast(builder, _load_float(builder, blocks[r], scale_at))
                scores_ = builder.fmul(builder.sitofp(sums, F32_VECTOR), scale)
                store_unaligned(builder, scores_, target)

        for_known(builder, dim, _KNOWN_DIMS, generate)

    return operation


def _interleave(builder: ir.IRBuilder, a: Any, b: Any, lanes: int) -> tuple[Any, Any]:
    """Interleave the lower, and the upper, halves of each 128 bits of two vectors of 256."""
    half = lanes // 4
    low, high = (
        _shuffle(
            builder, a, b,
            [
                place
                for run in (0, lanes // 2)
                for i in range(run + start, run + start + half)
                for place in (i, lanes + i)
            ],
        )
        for start in (0, half)
    )  # fmt: skip
    return low, high


def _sum_registers(context: Any) -> int:
    """Return how many registers of 256 bits sums may take."""
    return min(32, 2 * register_vectors(context)) - 4


def _sums_per_unit(context: Any) -> int:
    """Return in how many vectors of 256 bits the sums of 32 dimensions are kept."""
    return 2 if pairs_in_int16(context, _BITS) else 4


class _ValueSums:
    """Running sums of weighted values over up to 32 keys, of some rows and units."""

    def __init__(self, context: Any, builder: ir.IRBuilder, rows: int, units: int) -> None:
        self._context, self._builder = context, builder
        self._has_pairs = pairs_in_int16(context, _BITS) > 0
        self.keys = 2 if self._has_pairs else 4
        self._kind = _HALVES if self._has_pairs else _WORDS
        vectors = range(units * _sums_per_unit(context))
        self._sums = [
            [cgutils.alloca_once(builder, self._kind) for _ in vectors] for _ in range(rows)
        ]

    def start(self, offsets: Sequence[Any]) -> None:
        """Start each row's sums with an int32."""
        builder, kind = self._builder, self._kind
        order = _constant(ir.VectorType(I32, kind.count), [0] * kind.count)
        for offset, sums in zip(offsets, self._sums, strict=True):
            first = builder.trunc(offset, I16) if self._has_pairs else offset
            undefined = ir.Constant(kind, ir.Undefined)
            vector = builder.insert_element(undefined, first, I32(0))
            for place in sums:
                builder.store(builder.shuffle_vector(vector, undefined, order), place)

    def add(self, unit: int, unpacked: Sequence[Any], rows: Sequence[Any]) -> None:
        """Add weighted values.

        Args:
            unit: number of the unit.
            unpacked: unit of ``keys`` entries.
            rows: pointers to the quants of ``keys`` weights.
        """
        builder, context = self._builder, self._context
        columns = self._columns(unpacked)
        for pointer, sums in zip(rows, self._sums, strict=True):
            weights = self._load_weights(pointer)
            first = unit * len(columns)
            for column, place in zip(columns, sums[first : first + len(columns)], strict=True):
                before = builder.load(place)
                if self._has_pairs:
                    after = builder.add(before, multiply_pairs(context, builder, column, weights))
                else:
                    after = add_products(context, builder, before, column, weights)
                builder.store(after, place)

    def _columns(self, unpacked: Sequence[Any]) -> list[Any]:
        """Return vectors with the numbers of all keys beside each other."""
        builder = self._builder
        as_bytes = [builder.bitcast(each, _BYTES) for each in unpacked]
        pairs = [
            _interleave(builder, as_bytes[i], as_bytes[i + 1], UNIT)
            for i in range(0, len(as_bytes), 2)
        ]
        if self._has_pairs:
            return [builder.bitcast(each, _WORDS) for each in pairs[0]]
        halves = [[builder.bitcast(each, _HALVES) for each in pair] for pair in pairs]
        return [
            builder.bitcast(each, _WORDS)
            for low, high in zip(*halves, strict=True)
            for each in _interleave(builder, low, high, _HALVES.count)
        ]

    def _load_weights(self, pointer: Any) -> Any:
        """Return 8 int32 of the same weights."""
        builder = self._builder
        kind = ir.VectorType(I16 if self._has_pairs else I32, UNIT // self.keys)
        word = builder.load(builder.bitcast(pointer, kind.element.as_pointer()))
        undefined = ir.Constant(kind, ir.Undefined)
        order = _constant(ir.VectorType(I32, kind.count), [0] * kind.count)
        vector = builder.insert_element(undefined, word, I32(0))
        return builder.bitcast(builder.shuffle_vector(vector, undefined, order), _WORDS)

    def row(self, row: int) -> list[Any]:
        """Return a row's sums as float32, 16 dimensions in a vector, in order."""
        builder = self._builder
        loaded = [builder.load(place) for place in self._sums[row]]
        if self._has_pairs:
            wide = [builder.sext(each, I32_VECTOR) for each in loaded]
        else:
            order = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
            wide = [
                _shuffle(builder, loaded[i], loaded[i + 1], order) for i in range(0, len(loaded), 2)
            ]
        return [builder.sitofp(each, F32_VECTOR) for each in wide]


class _WeighedValues(NamedTuple):
    """Values, and the weights that rows give them.

    Attributes:
        span, ahead: the values, and what is prefetched meanwhile.
        weights: each row's pointer to the weights of key 0.
        first, end: numbers of the keys.
    """

    span: SpanCode
    ahead: SpanCode
    weights: Sequence[Any]
    first: Any
    end: Any


def _weigh_units(
    context: Any, builder: ir.IRBuilder, values: _WeighedValues, dim: Any, units: range
) -> Sums:
    """Return the weighted sums of some units, counted from dimension ``dim``, over all keys."""
    rows = len(values.weights)
    totals = Sums(builder, rows, 2 * len(units))
    group_sums = _ValueSums(context, builder, rows, len(units))
    start_group = builder.sdiv(values.first, integer(UNIT))
    groups = builder.sdiv(builder.add(values.end, integer(UNIT - 1)), integer(UNIT))
    with cgutils.for_range(builder, groups, start=start_group, intp=I64) as group:
        start_key = builder.mul(group.index, integer(UNIT))
        blocks = [builder.gep(row, [start_key]) for row in values.weights]
        offsets = [_load_integer(builder, b, integer(_UNIT_WORDS + 1)) for b in blocks]
        group_sums.start(offsets)
        _add_group(builder, group_sums, values, start_key, blocks, dim, units)
        for r, block in enumerate(blocks):
            scale = broadcast(builder, _load_float(builder, block, integer(_UNIT_WORDS)))
            for column, value in enumerate(group_sums.row(r)):
                totals.add(r, column, value, scale)
    return totals


def _add_group(
    builder: ir.IRBuilder, sums: _ValueSums, values: _WeighedValues, start_key: Any,
    blocks: Sequence[Any], dim: Any, units: range,
) -> None:  # fmt: skip
    """Add the values of up to 32 keys from ``start_key`` on, a few keys at a time.

    Args:
        sums: where they are added.
        values: see ``_weigh_units``.
        start_key: a multiple of 32.
        blocks: each row's pointer to the weights of these keys.
        dim, units: see ``_weigh_units``; the first unit prefetches.
    """
    keys = sums.keys
    left = builder.sub(values.end, start_key)
    full = builder.icmp_signed("<", left, integer(UNIT))
    count = builder.select(full, left, integer(UNIT))
    count = builder.sdiv(builder.add(count, integer(keys - 1)), integer(keys))
    quants = [builder.bitcast(block, I8.as_pointer()) for block in blocks]
    located = values.span.locate(start_key, UNIT)
    fetched = values.ahead.locate(start_key, UNIT) if units.start == 0 else None
    with cgutils.for_range(builder, count, intp=I64) as few:
        offset = builder.mul(few.index, integer(keys))
        if fetched is not None:
            fetched.prefetch(offset, keys)
        entries = [located.entry(builder.add(offset, integer(i))) for i in range(keys)]
        pointers = [builder.gep(row, [offset]) for row in quants]
        for place, unit in enumerate(units):
            number = builder.add(dim, integer(unit * UNIT))
            byte = builder.ashr(number, integer(1))
            unpacked = [_unpack(builder, builder.gep(e, [byte])) for e in entries]
            sums.add(place, unpacked, pointers)


def _weigh_int4(rows: int, units: int) -> Any:
    """Generate the kernel for ``rows`` rows of weights and ``units`` * 32 dimensions."""

    @generated(types.void, OWN, INDEX, INDEX, OWN, INDEX, INDEX, INDEX, INDEX, OWN, OWN, INDEX)
    def operation(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
        """Compute sums[r, :width] = weights[r, first:end] @ V[first:end, dim:dim + width].

        Args:
            weights: float32, rows weights_stride apart, from weights_at on; of each 32 keys, a
                block in the words of these keys.
            values: a KVSpan, V of 4-bit entries.
            first: a multiple of 32. Of 32 keys those from ``end`` on have weights of 0.
            ahead: a KVSpan whose entries first to end are prefetched.
            sums: float32, rows head_dim apart, from sums_at on.
        """
        weights, at, stride, values, first, end, head_dim, dim, ahead, sums, to = arguments

        def generate(head_dim: Any) -> None:
            span = SpanCode(context, builder, kinds[3], values, head_dim)
            prefetched = SpanCode(context, builder, kinds[8], ahead, head_dim)
            start = address(context, builder, kinds[0], weights, at)
            weight_rows = row_pointers(builder, start, stride, rows)
            start = address(context, builder, kinds[9], sums, to)
            targets = row_pointers(builder, start, head_dim, rows)
            weighed = _WeighedValues(span, prefetched, weight_rows, first, end)
            together = 2 if 2 * rows * _sums_per_unit(context) <= _sum_registers(context) else 1
            for part in range(0, units, together):
                some = range(part, min(part + together, units))
                totals = _weigh_units(context, builder, weighed, dim, some)
                totals.write([builder.gep(target, [integer(part * UNIT)]) for target in targets])

        for_known(builder, head_dim, _KNOWN_DIMS, generate)

    return operation


score_int4 = kernel_by_number({rows: _score_int4(rows) for rows in (3, 4, 2, 1)})
weigh_int4_wide, weigh_int4_narrow = (
    kernel_by_number({rows: _weigh_int4(rows, units) for rows in (3, 4, 2, 5, 1)})
    for units in (2, 1)
)
