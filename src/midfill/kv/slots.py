"""SlotAllocator: the free list of KV slots."""

import numpy as np

from midfill.arrays import Int32Array

_FREE = -1


class OutOfSlotsError(RuntimeError):
    """More slots were requested than are free; the engine's accounting should prevent it."""


class SlotAllocator:
    """A stack of free slot numbers, 0 to ``total - 1``.

    A new pool allocates ascending slots, so a prompt's KV is contiguous. Freed slots are allocated
    again in the order in which they were passed to ``free``, the latest call first.

    Attributes:
        total: number of slots.
    """

    def __init__(self, total: int) -> None:
        """Create an allocator with all slots free.

        Raises:
            ValueError: ``total`` is below 1.
        """
        if total < 1:
            raise ValueError(f"a pool needs at least one slot, not {total}")
        self.total = total
        self._stack: Int32Array = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._free = total
        # A slot's index in the array it was allocated or freed with, or _FREE. One comparison
        # detects double frees, those within one call included.
        self._place: Int32Array = np.full(total, _FREE, dtype=np.int32)

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return self._free

    def allocate(self, count: int) -> Int32Array:
        """Allocate ``count`` slots; return them as [count] int32.

        Raises:
            OutOfSlotsError: fewer are free; nothing is allocated then.
        """
        if count > self._free:
            raise OutOfSlotsError(f"{count} slots requested, {self._free} are free")
        left = self._free - count
        slots = self._stack[left : self._free][::-1].copy()
        self._place[slots] = 0
        self._free = left
        return slots

    def free(self, slots: Int32Array) -> None:
        """Free [n] int32 slots.

        Raises:
            ValueError: a slot is out of range, free already, or named twice; nothing is freed then.
        """
        count = len(slots)
        if count == 0:
            return
        if int(slots.min()) < 0 or int(slots.max()) >= self.total:
            raise ValueError(f"slots out of range 0..{self.total - 1}")
        if (self._place[slots] == _FREE).any():
            raise ValueError("a slot that is free already was freed again")
        order = np.arange(count, dtype=np.int32)
        self._place[slots] = order
        if (self._place[slots] != order).any():
            raise ValueError("a slot was named twice in one call to free")
        self._place[slots] = _FREE
        self._stack[self._free : self._free + count] = slots[::-1]
        self._free += count
