"""SequenceKV: the KV slots of one sequence, in order of position."""

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.joint_slots import JointSlots
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import RadixNode


class SequenceKV:
    """The KV slots of one sequence.

    The first ``shared`` slots belong to the prefix cache and are locked there. The sequence owns
    the others until ``cache_prefix`` hands them over.

    Once cells have been put in the place of the first tokens (``exchange``, then ``prefix``), the
    slots are those of later tokens only, and none of them is cached: their KV depends on what was
    left out.

    KV that was copied from elsewhere, or that attends to such KV, is kept private, too: it is not
    what the tokens' own computation would give.

    Attributes:
        reserved: number of slots held, whether their KV has been computed or not.
        shared: how many of them belong to the prefix cache, or to other answers as well.
        prefix: what stands for the first tokens; None if they have slots like all others.
        is_private: whether nothing beyond what is shared now may go to the prefix cache.
    """

    def __init__(self, pool: KVPool, tenant: str, capacity: int) -> None:
        """Hold no slots yet.

        Args:
            pool: where slots come from.
            tenant: whose prefixes may be shared.
            capacity: maximum number of slots. The array for them is allocated once; the operating
                system backs it with memory as it fills.
        """
        self.reserved = 0
        self.shared = 0
        self.prefix: CompressedPrefix | None = None
        self.is_private = False
        self._pool = pool
        self._tenant = tenant
        self._buffer: Int32Array = np.empty(capacity, dtype=np.int32)
        self._node: RadixNode | None = None
        self._joint: JointSlots | None = None

    @property
    def slots(self) -> Int32Array:
        """[reserved] int32, a view."""
        return self._buffer[: self.reserved]

    @property
    def node(self) -> RadixNode | None:
        """The end of the cached path that this sequence has locked; None if it shares nothing."""
        return self._node

    @property
    def first(self) -> int:
        """Number of the token that the first slot belongs to."""
        return 0 if self.prefix is None else self.prefix.tokens

    @property
    def shift(self) -> int:
        """By how much a later token's position is less than its number."""
        return 0 if self.prefix is None else self.prefix.tokens - self.prefix.next_position

    @property
    def owned(self) -> int:
        """Number of slots that the sequence owns, that is, does not share."""
        together = sum(one.owned for one in (self.prefix, self._joint) if one is not None)
        return self.reserved - self.shared + together

    def match_prefix(self, tokens: Int32Array) -> int:
        """Lock and share the longest cached prefix of [n] int32 ``tokens``; return its length.

        May be called once, while no slots are held.
        """
        found = self._pool.cache.match(self._tenant, tokens)
        self._pool.cache.lock(found.node)
        self._node = found.node
        self.reserved = self.shared = len(found)
        self._buffer[: self.shared] = found.slots
        return self.shared

    def reserve(self, count: int) -> None:
        """Allocate ``count`` slots after the last one, evicting cached prefixes when needed.

        Raises:
            OutOfSlotsError: fewer are available.
        """
        self._buffer[self.reserved : self.reserved + count] = self._pool.allocate(count)
        self.reserved += count

    def append(self, slot: int) -> None:
        """Add one slot that the caller has allocated."""
        self._buffer[self.reserved] = slot
        self.reserved += 1

    def own_slots(self) -> Int32Array:
        """Return the slots that no other sequence and not the cache uses: [owned] int32."""
        own = self._buffer[self.shared : self.reserved]
        if self.prefix is None or not self.prefix.owned:
            return own.copy()
        return np.concatenate((self.prefix.slots, own))

    def exchange(self, count: int) -> Int32Array:
        """Release all slots but the first ``count`` of ``own_slots``, and allocate missing ones.

        Returns:
            [count] int32; they belong to the caller, and the sequence holds none.

        Raises:
            OutOfSlotsError: fewer are available.
        """
        own = self._buffer[self.shared : self.reserved].copy()
        if self.prefix is not None:
            own = np.concatenate((self.prefix.take_over(), own))
        self._pool.slots.free(own[count:])
        self._pool.cache.unlock(self._node)
        self._node = self.prefix = None
        self.reserved = self.shared = 0
        missing = count - len(own)
        if missing <= 0:
            return own[:count]
        return np.concatenate((own, self._pool.allocate(missing)))

    def truncate(self, tokens: int) -> None:
        """Free the slots of all tokens after the first ``tokens``.

        Raises:
            ValueError: some of them belong to the cache or to other answers, or are compressed.
        """
        count = tokens - self.first
        if count < self.shared:
            raise ValueError(f"can't truncate to {count} slots: {self.shared} are shared")
        self._pool.slots.free(self._buffer[count : self.reserved])
        self.reserved = count

    def cache_prefix(self, tokens: Int32Array) -> None:
        """Hand the KV of [n] int32 ``tokens`` over to the prefix cache and share it from now on.

        ``tokens`` are the sequence's from position 0, at most those whose KV has been computed.
        Where another sequence has cached a position in the meantime, the sequence frees its own
        slot and uses the cached one. Nothing is cached once the KV is compressed, or if it is
        private.
        """
        count = len(tokens)
        if count == self.shared or self.prefix is not None or self.is_private:
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
        """Return the KV of another sequence that shares all of this one's slots.

        Private slots are owned by both from then on.

        Raises:
            ValueError: the sequence owns slots, which can't be shared.
        """
        if self.reserved > self.shared:
            if not self.is_private or self._joint is not None:
                raise ValueError("only KV that the cache holds can be shared")
            own = self._buffer[self.shared : self.reserved].copy()
            self._joint = JointSlots(own, self._pool.slots)
            self.shared = self.reserved
        twin = SequenceKV(self._pool, self._tenant, len(self._buffer))
        twin.is_private = self.is_private
        twin._joint = None if self._joint is None else self._joint.share()
        twin._buffer[: self.shared] = self.slots
        twin.reserved = twin.shared = self.shared
        twin._node = self._node
        twin.prefix = None if self.prefix is None else self.prefix.share()
        self._pool.cache.lock(self._node)
        return twin

    def release(self, tokens: Int32Array) -> None:
        """Cache the KV of ``tokens`` (see ``cache_prefix``) and release all slots."""
        self.cache_prefix(tokens)
        self.discard()

    def discard(self) -> None:
        """Release all slots; KV that is not in the cache yet is lost."""
        self._pool.slots.free(self._buffer[self.shared : self.reserved].copy())
        self._pool.cache.unlock(self._node)
        for one in (self.prefix, self._joint):
            if one is not None:
                one.release()
        self._node = self.prefix = self._joint = None
        self.reserved = self.shared = 0
