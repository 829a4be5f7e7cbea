"""KVPool: all KV slots of one runner; each is free, the prefix cache's or a sequence's own."""

from midfill.kv.radix_cache import RadixCache
from midfill.kv.slots import Int32Array, SlotAllocator


class KVPool:
    """The free list and the prefix cache over the same slots.

    Attributes:
        slots: the free list.
        cache: the prefix cache; what it evicts goes back to the free list.
    """

    def __init__(self, slots: int) -> None:
        self.slots = SlotAllocator(slots)
        self.cache = RadixCache()

    @property
    def available(self) -> int:
        """Slots that ``allocate`` can deliver: the free ones and those the cache can give up."""
        return self.slots.free_slots + self.cache.evictable_tokens

    def allocate(self, count: int) -> Int32Array:
        """Take ``count`` slots, evicting cached prefixes when too few are free; [count] int32.

        Raises:
            OutOfSlotsError: fewer are available.
        """
        missing = count - self.slots.free_slots
        if missing > 0:
            self.slots.free(self.cache.evict(missing))
        return self.slots.allocate(count)
