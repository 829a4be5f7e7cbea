"""KVPool: all KV slots of one runner. Each is free, cached, or owned by a sequence."""

from midfill.arrays import Int32Array
from midfill.kv.radix_cache import RadixCache
from midfill.kv.slots import SlotAllocator


class KVPool:
    """The free list and the prefix cache over the same slots.

    Attributes:
        slots: the free list.
        cache: the prefix cache; slots that it evicts return to the free list.
    """

    def __init__(self, slots: int) -> None:
        """Create a pool of ``slots`` free slots and an empty cache."""
        self.slots = SlotAllocator(slots)
        self.cache = RadixCache()

    @property
    def available(self) -> int:
        """Number of slots that ``allocate`` can return: the free and the evictable ones."""
        return self.slots.free_slots + self.cache.evictable_tokens

    def allocate(self, count: int) -> Int32Array:
        """Allocate ``count`` slots, evicting cached prefixes when needed; return [count] int32.

        Raises:
            OutOfSlotsError: fewer are available.
        """
        missing = count - self.slots.free_slots
        if missing > 0:
            self.slots.free(self.cache.evict(missing))
        return self.slots.allocate(count)
