"""KVPool: all KV slots of one runner. Each is free, cached, or owned by a sequence."""

from midfill.arrays import Int32Array
from midfill.kv.radix_cache import RadixCache
from midfill.kv.slots import SlotAllocator

_MIN_NODES = 4096
_TOKENS_PER_NODE = 8
NODE_BYTES = (
    900  # of a node with its arrays' objects and its entry in the queue; a test measures it
)
_TOKEN_BYTES = 8  # of the token's id and of its slot


class KVPool:
    """The free list and the prefix cache over the same slots.

    Attributes:
        slots: the free list.
        cache: the prefix cache; slots that it evicts return to the free list.
        max_nodes: maximum number of the cache's nodes after ``trim``.
    """

    def __init__(self, slots: int) -> None:
        """Create a pool of ``slots`` free slots and an empty cache."""
        self.slots = SlotAllocator(slots)
        self.cache = RadixCache()
        self.max_nodes = max(_MIN_NODES, slots // _TOKENS_PER_NODE)

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

    @property
    def index_bytes(self) -> int:
        """Memory of the prefix cache's trees, without the KV."""
        return NODE_BYTES * self.cache.nodes + _TOKEN_BYTES * self.cache.cached_tokens

    def trim(self) -> None:
        """Evict what was used least recently while the cache has too many nodes.

        A tree of prompts that part after every few tokens takes more memory than their KV may.
        Locked paths stay.
        """
        while self.cache.nodes > self.max_nodes:
            slots = self.cache.evict_leaf()
            if not len(slots):
                return
            self.slots.free(slots)
