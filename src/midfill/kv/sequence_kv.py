"""SequenceKV: the slots that hold one sequence's KV, in order of position."""

import numpy as np

from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import RadixNode
from midfill.kv.slots import Int32Array


class SequenceKV:
    """One sequence's slots. The first ``shared`` of them belong to the prefix cache and are locked
    there; the rest are the sequence's own until ``keep`` hands them over.

    Attributes:
        reserved: slots held, whether their KV has been computed or not.
        shared: of these, how many are the cache's.
    """

    def __init__(self, pool: KVPool, tenant: str, capacity: int) -> None:
        """Hold nothing yet, with room for ``capacity`` slots.

        The room is set aside once; the operating system backs it with memory as it fills.
        """
        self.reserved = 0
        self.shared = 0
        self._pool = pool
        self._tenant = tenant
        self._buffer: Int32Array = np.empty(capacity, dtype=np.int32)
        self._node: RadixNode | None = None

    @property
    def slots(self) -> Int32Array:
        """[reserved] int32, a view."""
        return self._buffer[: self.reserved]

    @property
    def node(self) -> RadixNode | None:
        """The cache's path that this sequence has locked."""
        return self._node

    @property
    def own(self) -> int:
        """How many slots are the sequence's own."""
        return self.reserved - self.shared

    def open(self, tokens: Int32Array) -> int:
        """Take over the cached prefix of [n] int32 ``tokens``; returns its length.

        To be called once, while nothing is held.
        """
        found = self._pool.cache.match(self._tenant, tokens)
        self._pool.cache.lock(found.node)
        self._node = found.node
        self.reserved = self.shared = len(found)
        self._buffer[: self.shared] = found.slots
        return self.shared

    def reserve(self, count: int) -> None:
        """Add ``count`` slots at the end, evicting others' cached prefixes when needed.

        Raises:
            OutOfSlotsError: fewer are available.
        """
        self._buffer[self.reserved : self.reserved + count] = self._pool.allocate(count)
        self.reserved += count

    def append(self, slot: int) -> None:
        """Add one slot that the caller allocated."""
        self._buffer[self.reserved] = slot
        self.reserved += 1

    def truncate(self, count: int) -> None:
        """Give back all slots after the first ``count``.

        Raises:
            ValueError: some of them are the cache's.
        """
        if count < self.shared:
            raise ValueError(f"{self.shared} slots are the cache's, so {count} can't be kept alone")
        self._pool.slots.free(self._buffer[count : self.reserved])
        self.reserved = count

    def keep(self, tokens: Int32Array) -> None:
        """Hand the KV of [n] int32 ``tokens`` over to the cache and go on using it there.

        ``tokens`` are the sequence's from position 0, as far as their KV has been computed. Slots
        of positions that somebody else cached meanwhile are freed and theirs used instead.
        """
        count = len(tokens)
        if count == self.shared:
            return
        cache = self._pool.cache
        stored = cache.insert(self._tenant, tokens, self._buffer[:count], self._node)
        if stored.node is not self._node:
            cache.lock(stored.node)
            cache.unlock(self._node)
            self._node = stored.node
        self._pool.slots.free(stored.duplicates)
        self._buffer[:count] = stored.slots
        self.shared = count

    def fork(self) -> "SequenceKV":
        """Start another sequence on the same KV; both go their own ways from here.

        Raises:
            ValueError: some slots are this sequence's own, so nobody else can use them.
        """
        if self.own:
            raise ValueError("only KV that the cache holds can be shared")
        twin = SequenceKV(self._pool, self._tenant, len(self._buffer))
        twin._buffer[: self.shared] = self.slots
        twin.reserved = twin.shared = self.shared
        twin._node = self._node
        self._pool.cache.lock(self._node)
        return twin

    def close(self, tokens: Int32Array) -> None:
        """Let go of everything; the KV of ``tokens`` (see ``keep``) stays cached, evictable."""
        self.keep(tokens)
        self.drop()

    def drop(self) -> None:
        """Let go of everything; KV that was not handed over is lost."""
        self._pool.slots.free(self._buffer[self.shared : self.reserved].copy())
        self._pool.cache.unlock(self._node)
        self._node = None
        self.reserved = self.shared = 0
