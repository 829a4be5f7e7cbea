"""Spans of KV entries: where the K or V of some keys of one head lie, and how to prefetch them.

A kernel that reads one span prefetches another meanwhile, entry by entry, into the second-level
cache: first the values of the keys being scored, then the keys of the next segment. So memory is
busy all the time, even where a prompt's slots are scattered and no hardware prefetcher can follow.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.kv_cache import (
    KVArray,
    entry_size,
    item_offset,
    load_entry_vector,
    numbers_in_item,
)
from midfill.kernels.cpu.memory import LINE, Int32Array
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I8,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    address,
    broadcast,
    f32x16,
    integer,
    llvm_call,
    load_unaligned,
    store_unaligned,
)

_I64S = ir.VectorType(I64, LANES)


class KVSpan(NamedTuple):
    """Entries of one head: number i belongs to slot slots[first + i], for 0 <= i < length.

    Attributes:
        entries: K or V of the cache, see kv_cache.py.
        base: element of ``entries`` at which the head's slot 0 lies.
        slots: int32, kv_slots of the batch.
        first: index of the span's first slot.
        length: entries in the span.
    """

    entries: KVArray
    base: int
    slots: Int32Array
    first: int
    length: int


class SpanCode:
    """A KVSpan in a function that is being generated.

    Attributes:
        builder: of the function.
        length: LLVM's value of the span's length.
    """

    def __init__(
        self, context: Any, builder: ir.IRBuilder, kind: Any, span: Any, head_dim: Any
    ) -> None:
        self._context, self.builder, self._head_dim = context, builder, head_dim
        self._entries_kind, _, self._slots_kind, _, _ = kind.types
        self._entries, self._base, self._slots, self._first, self.length = cgutils.unpack_tuple(
            builder, span
        )

    def entry(self, index: Any) -> Any:
        """Return a pointer to an entry; beyond the span's end, to its last entry."""
        builder = self.builder
        slot = builder.load(self._slot(index))
        offset = builder.add(self._base, builder.mul(builder.sext(slot, I64), self._head_dim))
        offset = item_offset(builder, self._entries_kind, offset)
        return address(self._context, builder, self._entries_kind, self._entries, offset)

    def _slot(self, index: Any) -> Any:
        """Return a pointer to an entry's slot; beyond the span's end, to that of the last one."""
        builder = self.builder
        last = builder.sub(self.length, integer(1))
        index = builder.select(builder.icmp_signed("<", index, last), index, last)
        at = builder.add(self._first, index)
        return address(self._context, builder, self._slots_kind, self._slots, at)

    def load_scales(self, kind: Any, scales: Any, head_at: Any, index: Any) -> Any:
        """Load the scales of 16 entries from number ``index`` on.

        Slots that follow one another, as most do, are read at once.

        Args:
            kind: Numba's type of ``scales``.
            scales: float32, of all entries.
            head_at: number of the head's entry of slot 0.
        """
        builder = self.builder

        def scale(slot: Any) -> Any:
            at = builder.add(head_at, builder.sext(slot, I64))
            return address(self._context, builder, kind, scales, at)

        found = cgutils.alloca_once(builder, F32_VECTOR)
        first = builder.load(self._slot(index))
        left = builder.sub(self.length, index)
        follow = cgutils.alloca_once_value(builder, ir.Constant(ir.IntType(1), 0))
        with builder.if_then(builder.icmp_signed(">=", left, integer(LANES))):
            slots = load_unaligned(builder, self._slot(index), I32_VECTOR)
            expected = builder.add(
                broadcast(builder, first), ir.Constant(I32_VECTOR, list(range(LANES)))
            )
            differing = builder.icmp_signed("!=", slots, expected)
            bits = builder.bitcast(differing, ir.IntType(LANES))
            builder.store(builder.icmp_signed("==", bits, ir.IntType(LANES)(0)), follow)
        with builder.if_else(builder.load(follow)) as (then, otherwise):
            with then:
                builder.store(load_unaligned(builder, scale(first), F32_VECTOR), found)
            with otherwise:
                gathered = ir.Constant(F32_VECTOR, ir.Undefined)
                for lane in range(LANES):
                    slot = builder.load(self._slot(builder.add(index, integer(lane))))
                    value = builder.load(scale(slot))
                    gathered = builder.insert_element(gathered, value, I32(lane))
                builder.store(gathered, found)
        return builder.load(found)

    def load(self, pointer: Any, element: Any) -> Any:
        """Load 16 numbers of an entry from ``element`` on as float32; quants without scale."""
        item = item_offset(self.builder, self._entries_kind, element)
        at = self.builder.gep(pointer, [item])
        return load_entry_vector(self._context, self.builder, self._entries_kind, at)

    def prefetch(self, index: Any, count: int) -> None:
        """Prefetch ``count`` entries into the second-level cache, if ``index`` is in the span."""
        builder = self.builder
        with builder.if_then(builder.icmp_signed("<", index, self.length)):
            self.prefetch_entries(
                [self.entry(builder.add(index, integer(i))) for i in range(count)]
            )

    def prefetch_entries(self, entries: Sequence[Any]) -> None:
        """Prefetch all lines of some entries."""
        builder = self.builder
        sixteen = builder.sdiv(self._head_dim, integer(LANES))
        size = builder.mul(sixteen, integer(entry_size(self._entries_kind, LANES)))
        lines = builder.sdiv(builder.add(size, integer(LINE - 1)), integer(LINE))
        pointers = [builder.bitcast(entry, I8.as_pointer()) for entry in entries]
        with cgutils.for_range(builder, lines, intp=I64) as line:
            for pointer in pointers:
                at = builder.gep(pointer, [builder.mul(line.index, integer(LINE))])
                hints = [I32(hint) for hint in (0, 2, 1)]  # read, second level, data
                llvm_call(builder, "llvm.prefetch.p0", [at, *hints], ir.VoidType())

    def locate(self, index: Any, count: int) -> "LocatedEntries":
        """Find where ``count`` entries lie, a multiple of 16; beyond the span's end, its last one.

        Where all are in the span, that takes a vector instruction per step of ``entry``.
        """
        builder = self.builder
        offsets = cgutils.alloca_once(builder, I64, count)
        left = builder.sub(self.length, index)
        has_any = builder.icmp_signed(">", left, integer(0))
        all_in_span = builder.icmp_signed(">=", left, integer(count))
        with builder.if_then(has_any), builder.if_else(all_in_span) as (then, rest):
            with then:
                for part in range(0, count, LANES):
                    slots = self._slot(builder.add(index, integer(part)))
                    slots = builder.sext(load_unaligned(builder, slots, I32_VECTOR), _I64S)
                    place = builder.gep(offsets, [integer(part)])
                    store_unaligned(builder, self._items(slots, _broadcast_long), place)
            with rest, cgutils.for_range(builder, integer(count), intp=I64) as loop:
                slot = builder.load(self._slot(builder.add(index, loop.index)))
                found = self._items(builder.sext(slot, I64), lambda _, value: value)
                builder.store(found, builder.gep(offsets, [loop.index]))
        return LocatedEntries(self, offsets, has_any)

    def _items(self, slots: Any, spread: Callable[[ir.IRBuilder, Any], Any]) -> Any:
        """Return at which items of their array the entries of one or more slots start."""
        builder = self.builder
        numbers = builder.mul(slots, spread(builder, self._head_dim))
        numbers = builder.add(numbers, spread(builder, self._base))
        per_item = numbers_in_item(self._entries_kind)
        return numbers if per_item == 1 else builder.ashr(numbers, spread(builder, integer(1)))

    def at(self, item: Any) -> Any:
        """Return a pointer to an item of the array of entries."""
        return address(self._context, self.builder, self._entries_kind, self._entries, item)


def _broadcast_long(builder: ir.IRBuilder, value: Any) -> Any:
    """Return 16 times an int64."""
    undefined = ir.Constant(_I64S, ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(I32_VECTOR, [0] * LANES))


class LocatedEntries:
    """Entries of a span whose places were looked up together; see ``SpanCode.locate``."""

    def __init__(self, span: SpanCode, items: Any, has_any: Any) -> None:
        self._span, self._items, self._has_any = span, items, has_any

    def entry(self, index: Any) -> Any:
        """Return a pointer to an entry, counted from the first one located."""
        builder = self._span.builder
        return self._span.at(builder.load(builder.gep(self._items, [index])))

    def prefetch(self, index: Any, count: int) -> None:
        """Prefetch ``count`` entries into the second-level cache."""
        builder = self._span.builder
        with builder.if_then(self._has_any):
            places = [builder.add(index, integer(i)) for i in range(count)]
            self._span.prefetch_entries([self.entry(place) for place in places])


@generated(f32x16, OWN, INDEX, OWN, INDEX)
def load_scales(context: Any, builder: Any, kinds: Any, *arguments: Any) -> Any:
    """Load the scales of 16 entries of a span, from number ``index`` on; see ``SpanCode``.

    Beyond the span's end, the scale of its last entry is repeated.

    Args:
        scales: float32, key_scales or value_scales of the cache.
        head_at: number of the head's entry of slot 0.
        span: a KVSpan.
    """
    scales, head_at, span, index = arguments
    code = SpanCode(context, builder, kinds[2], span, integer(0))
    return code.load_scales(kinds[0], scales, head_at, index)
