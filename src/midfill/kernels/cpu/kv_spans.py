"""Spans of KV entries: where the K or V of some keys of one head lie, and how to prefetch them.

A kernel that reads one span prefetches another meanwhile, entry by entry, into the second-level
cache: first the values of the keys being scored, then the keys of the next segment. So memory is
busy all the time, even where a prompt's slots are scattered and no hardware prefetcher can follow.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from midfill.kernels.cpu.kv_cache import KVArray, entry_size, item_offset, load_entry_vector
from midfill.kernels.cpu.memory import LINE, Int32Array
from midfill.kernels.cpu.simd import I8, I32, I64, LANES, address, integer, llvm_call


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
        length: LLVM's value of the span's length.
    """

    def __init__(
        self, context: Any, builder: ir.IRBuilder, kind: Any, span: Any, head_dim: Any
    ) -> None:
        self._context, self._builder, self._head_dim = context, builder, head_dim
        self._entries_kind, _, self._slots_kind, _, _ = kind.types
        self._entries, self._base, self._slots, self._first, self.length = cgutils.unpack_tuple(
            builder, span
        )

    def entry(self, index: Any) -> Any:
        """Return a pointer to an entry; beyond the span's end, to its last entry."""
        builder = self._builder
        last = builder.sub(self.length, integer(1))
        index = builder.select(builder.icmp_signed("<", index, last), index, last)
        at = builder.add(self._first, index)
        slot = builder.load(address(self._context, builder, self._slots_kind, self._slots, at))
        offset = builder.add(self._base, builder.mul(builder.sext(slot, I64), self._head_dim))
        offset = item_offset(builder, self._entries_kind, offset)
        return address(self._context, builder, self._entries_kind, self._entries, offset)

    def load(self, pointer: Any, element: Any) -> Any:
        """Load 16 numbers of an entry from ``element`` on as float32; quants without scale."""
        item = item_offset(self._builder, self._entries_kind, element)
        at = self._builder.gep(pointer, [item])
        return load_entry_vector(self._context, self._builder, self._entries_kind, at)

    def prefetch(self, index: Any, count: int) -> None:
        """Prefetch ``count`` entries into the second-level cache, if ``index`` is in the span."""
        builder = self._builder
        sixteen = builder.sdiv(self._head_dim, integer(LANES))
        size = builder.mul(sixteen, integer(entry_size(self._entries_kind, LANES)))
        lines = builder.sdiv(builder.add(size, integer(LINE - 1)), integer(LINE))
        with builder.if_then(builder.icmp_signed("<", index, self.length)):
            pointers = [
                builder.bitcast(self.entry(builder.add(index, integer(i))), I8.as_pointer())
                for i in range(count)
            ]
            with cgutils.for_range(builder, lines, intp=I64) as line:
                for pointer in pointers:
                    at = builder.gep(pointer, [builder.mul(line.index, integer(LINE))])
                    hints = [I32(hint) for hint in (0, 2, 1)]  # read, second level, data
                    llvm_call(builder, "llvm.prefetch.p0", [at, *hints], ir.VoidType())
