"""KVPool: all KV slots of one runner. Each is free, cached, or owned by a sequence."""

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.radix_cache import RadixCache
from midfill.kv.state_pool import StatePool, StateStore

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
        states: room for states beside the slots; None for models without.
    """

    def __init__(self, slots: int, states: StateStore | None = None) -> None:
        """Create a pool of ``slots`` free slots, and free states, and an empty cache."""
        self.slots = SlotAllocator(slots)
        self.cache = RadixCache()
        self.states = None if states is None else StatePool(states, slots)
        if self.states is not None:
            self.cache.watch(self.states)
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
        self._uses: Int32Array | None = None

    def count_uses(self) -> Int32Array:
        """Return how often each slot has been allocated: [total] int32, counted from now on.

        Whoever notes something about what a slot holds can tell by it whether that is still there.
        """
        if self._uses is None:
            self._uses = np.zeros(self.total, np.int32)
        return self._uses

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
        if self._uses is not None:
            self._uses[slots] += 1
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
