"""SequenceKV: the KV slots of one sequence, in order of position."""

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.branches import Branch
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CacheRoot, RadixNode


class SequenceKV:
    """The KV slots of one sequence.

    The first ``shared`` slots belong to the prefix cache and are locked there. The sequence owns
    the others until ``cache_prefix`` hands them over.

    Once cells have been put in the place of the first tokens (``exchange``, then ``prefix``), the
    slots are those of later tokens only, and none of them is cached: their KV depends on what was
    left out.

    In models with states, it also has the state after the tokens that it has computed. What it
    leaves in the cache, it leaves with that state as a snapshot after the last of them.

    KV that was copied from elsewhere, or that attends to such KV, is not what its tokens give by
    themselves. It goes to a ``Branch`` of the cache, which begins after ``base`` exact tokens.

    Attributes:
        reserved: number of slots held, whether their KV has been computed or not.
        shared: how many of them belong to the prefix cache.
        base: how many of these are in the tenant's own tree.
        is_private: whether nothing of it may go to the cache, since layers lack tokens.
        low_priority: whether what it leaves in the cache is evicted before all that others use.
        prefix: what stands for the first tokens; None if they have slots like all others.
        state: number of its state; None before ``start_state``, and in models without.
        state_tokens: how many tokens the state has seen.
    """

    def __init__(
        self,
        pool: KVPool,
        root: CacheRoot,
        capacity: int,
        *,
        is_private: bool = False,
        low_priority: bool = False,
    ) -> None:
        """Hold no slots yet.

        Args:
            pool: where slots come from.
            root: the tree whose prefixes may be shared.
            capacity: maximum number of slots. The array for them is allocated once; the operating
                system backs it with memory as it fills.
            is_private, low_priority: see the class.
        """
        self.reserved = 0
        self.shared = 0
        self.base = 0
        self.prefix: CompressedPrefix | None = None
        self.state: int | None = None
        self.state_tokens = 0
        self._snapshot: int | None = None  # the slot before the one that is held
        self._pool = pool
        self.is_private = is_private
        self.low_priority = low_priority
        self._root: CacheRoot = root
        self._buffer: Int32Array = np.empty(capacity, dtype=np.int32)
        self._base_node: RadixNode | None = None
        self._node: RadixNode | None = None

    @property
    def slots(self) -> Int32Array:
        """[reserved] int32, a view."""
        return self._buffer[: self.reserved]

    @property
    def nodes(self) -> tuple[RadixNode | None, RadixNode | None]:
        """The ends of the cached paths that this sequence has locked; None where there is none."""
        return self._base_node, self._node

    @property
    def is_exact(self) -> bool:
        """Whether its KV is what its tokens give by themselves."""
        return isinstance(self._root, str)

    @property
    def first(self) -> int:
        """Number of the token that the first slot belongs to."""
        return 0 if self.prefix is None else self.prefix.tokens

    @property
    def owned(self) -> int:
        """Number of slots that the sequence owns, that is, does not share."""
        return self.reserved - self.shared + (0 if self.prefix is None else self.prefix.owned)

    def match_prefix(self, tokens: Int32Array) -> int:
        """Lock and share the longest cached prefix of [n] int32 ``tokens``; return its length.

        May be called once, while no slots are held. In models with states, the prefix has to end
        where a snapshot is, which is held until ``start_state``.
        """
        self._node = self._share(tokens)
        if self._pool.states is not None and self.shared:
            slot = int(self._buffer[self.shared - 1])
            self._pool.states.hold(slot)
            self._snapshot = slot
        return self.shared

    @property
    def state_is_ahead(self) -> bool:
        """Whether its state has seen tokens that it has no slots for any more."""
        return self.state is not None and self.state_tokens > self.reserved

    def start_state(self) -> None:
        """Take a state, in models that have any: that of the shared tokens.

        Raises:
            OutOfStatesError: other sequences have, and hold, all states.
        """
        states = self._pool.states
        if states is None:
            return
        self.state = states.start(self._snapshot)
        self.state_tokens = self.shared
        self._drop_hold()

    def keep_snapshot(self) -> None:
        """Copy the state as a snapshot after its tokens, which the cache holds; if there is room.

        Raises:
            ValueError: the cache doesn't hold just these tokens.
        """
        if self._pool.states is None or self.state is None:
            return
        if not 0 < self.state_tokens == self.shared:
            raise ValueError(f"a state of {self.state_tokens} tokens after {self.shared} cached")
        self._pool.states.snapshot(self.state, int(self._buffer[self.shared - 1]))

    def match_branch(self, tokens: Int32Array, branch: Branch) -> int:
        """Lock and share a branch and what it begins after, as far as [n] int32 ``tokens`` go.

        May be called once, while no slots are held, with a branch that ``Branches.find`` returned.
        """
        self._node = self._share(tokens[: len(branch.base)])
        self.start_branch(branch)
        self._node = self._share(tokens[self.base :])
        return self.shared

    def start_branch(self, branch: Branch) -> None:
        """Have KV that is computed from now on go to a branch, which begins after what is shared.

        Raises:
            ValueError: the branch begins elsewhere.
        """
        if len(branch.base) != self.shared or self._base_node is not None:
            raise ValueError("a branch begins after all exact tokens")
        self.base, self._base_node = self.shared, self._node
        self._root, self._node = branch.root, None

    def _share(self, tokens: Int32Array) -> RadixNode | None:
        """Lock the longest cached prefix of ``tokens`` in the root, and share its slots."""
        found = self._pool.cache.match(self._root, tokens, low_priority=self.low_priority)
        self._pool.cache.lock(found.node)
        self._buffer[self.shared : self.shared + len(found)] = found.slots
        self.shared += len(found)
        self.reserved = self.shared
        return found.node

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
        self._unlock()
        self.prefix = None
        missing = count - len(own)
        if missing <= 0:
            return own[:count]
        return np.concatenate((own, self._pool.allocate(missing)))

    def truncate(self, tokens: int) -> None:
        """Free the slots of all tokens after the first ``tokens``, if there are any.

        Raises:
            ValueError: some of them belong to the cache, or are compressed.
        """
        count = min(tokens - self.first, self.reserved)
        if count == self.reserved:
            return
        if count < self.shared:
            raise ValueError(f"can't truncate to {count} slots: the cache holds {self.shared}")
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
        own = slice(self.base, count)
        stored = cache.insert(
            self._root,
            tokens[own],
            self._buffer[own],
            self._node,
            low_priority=self.low_priority,
        )
        if stored.node is not self._node:
            cache.lock(stored.node)
            cache.unlock(self._node)
            self._node = stored.node
        self._pool.slots.free(stored.duplicates)
        self._buffer[own] = stored.slots
        self.shared = count

    def fork(self) -> "SequenceKV":
        """Return the KV of another sequence that shares all of this one's slots.

        Raises:
            ValueError: the sequence owns slots, which can't be shared.
        """
        if self.reserved > self.shared:
            raise ValueError("only KV that the cache holds can be shared")
        twin = SequenceKV(self._pool, "", len(self._buffer), low_priority=self.low_priority)
        twin._root, twin.base = self._root, self.base
        twin._buffer[: self.shared] = self.slots
        twin.reserved = twin.shared = self.shared
        twin._base_node, twin._node = self.nodes
        twin.prefix = None if self.prefix is None else self.prefix.share()
        for node in self.nodes:
            self._pool.cache.lock(node)
        if self._pool.states is not None and self.state is not None:
            twin.state = self._pool.states.fork(self.state)
            twin.state_tokens = self.state_tokens
        return twin

    def release(self, tokens: Int32Array, *, is_passing: bool = False) -> None:
        """Cache the KV of ``tokens`` (see ``cache_prefix``) and release all slots.

        Args:
            tokens: [n] int32, those that are computed.
            is_passing: whether the sequence has only stopped there, and will go on.
        """
        self.cache_prefix(tokens)
        states, state = self._pool.states, self.state
        if states is not None and state is not None and 0 < self.state_tokens == self.shared:
            slot = int(self._buffer[self.shared - 1])
            states.give(state, slot, is_passing=is_passing, low_priority=self.low_priority)
            self.state = None
        self.discard()

    def discard(self) -> None:
        """Release all slots; KV that is not in the cache yet is lost."""
        self._pool.slots.free(self._buffer[self.shared : self.reserved].copy())
        if self.prefix is not None:
            self.prefix.release()
        self.prefix = None
        if self._pool.states is not None and self.state is not None:
            self._pool.states.release(self.state)
        self.state = None
        self._drop_hold()
        self._unlock()

    def _drop_hold(self) -> None:
        if self._pool.states is not None and self._snapshot is not None:
            self._pool.states.drop_hold(self._snapshot)
        self._snapshot = None

    def _unlock(self) -> None:
        """Share nothing any more."""
        for node in self.nodes:
            self._pool.cache.unlock(node)
        self._base_node = self._node = None
        self.reserved = self.shared = self.base = 0
