"""StatePool: states of running sequences, and snapshots of states beside the prefix cache.

Layers with a state instead of KV (``ModelConfig.state_space``) know all tokens they have seen by
one state of a fixed size. A cached prefix is of no use to them without the state after its last
token, and there is none in between two tokens for which it was not kept. So states are copied at
some of a sequence's tokens, and a prefix that is found in the cache counts up to its last token
with such a *snapshot*.

A snapshot is known by the KV slot of the token that it comes after. A slot in the cache stands for
one token in its place behind all tokens before it, whatever the tree does with its nodes; when the
cache evicts it, the snapshot goes, too. That sequences need states comes before snapshots: the one
used least recently gives its place.

A prompt that stops somewhere, since it waits for the engine to be idle again, or was preempted or
cancelled, leaves its state where nobody else is likely to start. Whoever goes on from there takes
that state instead of a copy: a long prompt in many parts has one snapshot, not one per part.
"""

from collections import Counter, OrderedDict
from typing import Protocol

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.radix_cache import CacheRoot

_NONE = -1


class StateStore(Protocol):
    """Where a runner keeps states. Calls go between steps, never within one."""

    @property
    def count(self) -> int:
        """Number of states that there is room for."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""

    def clear(self, state: int) -> None:
        """Make a state that of no token."""

    def copy(self, source: int, target: int) -> None:
        """Copy one state over another."""


class OutOfStatesError(RuntimeError):
    """More states were requested than there are; the engine's accounting should prevent it."""


class StatePool:
    """Room for states: each is free, of a running sequence, or a snapshot.

    Implements ``radix_cache.CacheWatcher``.

    Attributes:
        store: where the states are.
        reused: how often a sequence has started from a snapshot.
        evicted: snapshots that gave their place, or went with their tokens.
    """

    def __init__(self, store: StateStore, slots: int) -> None:
        """Create a pool of free states.

        Args:
            store: the runner's.
            slots: number of KV slots.
        """
        self.store = store
        self.reused = self.evicted = 0
        self._free = list(range(store.count - 1, -1, -1))
        self._used: set[int] = set()
        # By the slot of the token before: the state, or _NONE; and the slots, least recently used
        # first.
        self._after: Int32Array = np.full(slots, _NONE, np.int32)
        self._order: OrderedDict[int, None] = OrderedDict()
        self._holds: Counter[int] = Counter()
        self._passing: set[int] = set()

    @property
    def free(self) -> int:
        """Number of states that are neither a sequence's nor a snapshot."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of states that sequences have."""
        return len(self._used)

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return len(self._order)

    def deepest(self, slots: Int32Array) -> int:
        """Return after how many tokens of a cached prefix the last snapshot is; 0 if there is none.

        Args:
            slots: [n] int32, those of the prefix in order.
        """
        places = np.flatnonzero(self._after[slots] != _NONE)
        return int(places[-1]) + 1 if len(places) else 0

    def hold(self, slot: int) -> None:
        """Keep the snapshot after a slot's token from giving its place, and mark it as just used.

        Raises:
            KeyError: there is none.
        """
        self._order.move_to_end(slot)
        self._holds[slot] += 1

    def drop_hold(self, slot: int) -> None:
        """Take back one ``hold``."""
        self._holds[slot] -= 1
        if not self._holds[slot]:
            del self._holds[slot]

    def start(self, slot: int | None) -> int:
        """Return a state for a sequence, of the snapshot after a slot's token, or an empty one.

        It is a copy, unless the snapshot is of a prompt that has stopped there.

        Args:
            slot: of a snapshot that is held; None starts before the first token.

        Raises:
            OutOfStatesError: sequences have, and hold, all states.
        """
        if slot is None:
            state = self._take()
            self.store.clear(state)
            return state
        if slot in self._passing and self._holds[slot] == 1:
            state = self._take_over(slot)
        else:
            state = self._take()
            self.store.copy(int(self._after[slot]), state)
        self.reused += 1
        return state

    def fork(self, state: int) -> int:
        """Return a copy of a sequence's state; raises what ``start`` does."""
        copied = self._take()
        self.store.copy(state, copied)
        return copied

    def release(self, state: int) -> None:
        """Free a sequence's state."""
        self._used.remove(state)
        self._free.append(state)

    def snapshot(self, state: int, slot: int) -> None:
        """Copy a sequence's state as the snapshot after a slot's token, if there is room.

        Args:
            state: the sequence's.
            slot: of its last token, in the cache.
        """
        if self._is_known(slot):
            return
        try:
            copied = self.fork(state)
        except OutOfStatesError:
            return
        self._put(copied, slot)

    def give(
        self, state: int, slot: int, *, is_passing: bool = False, low_priority: bool = False
    ) -> None:
        """Make a sequence's state, which it needs no more, the snapshot after a slot's token.

        Args:
            state: the sequence's.
            slot: of its last token, in the cache.
            is_passing: whether the sequence has only stopped there.
            low_priority: whether the snapshot gives its place before all others, until it is used.
        """
        if self._is_known(slot):
            self.release(state)
            if not is_passing:
                self._passing.discard(slot)
            return
        self._put(state, slot)
        if is_passing:
            self._passing.add(slot)
        if low_priority:
            self._order.move_to_end(slot, last=False)

    def added(self, root: CacheRoot, tokens: Int32Array, slots: Int32Array, after: int) -> None:
        """See ``CacheWatcher.added``: new tokens have no snapshots yet."""

    def removed(self, slots: Int32Array) -> None:
        """See ``CacheWatcher.removed``: snapshots go with their tokens."""
        for slot in slots[self._after[slots] != _NONE].tolist():
            self._evict(slot)

    def _is_known(self, slot: int) -> bool:
        """Whether there is a snapshot after a slot's token; it is marked as just used."""
        if self._after[slot] == _NONE:
            return False
        self._order.move_to_end(slot)
        return True

    def _put(self, state: int, slot: int) -> None:
        self._used.remove(state)
        self._after[slot] = state
        self._order[slot] = None

    def _take_over(self, slot: int) -> int:
        """Make a snapshot a sequence's state."""
        self._forget(slot)
        state = self._free.pop()
        self._used.add(state)
        return state

    def _take(self) -> int:
        if not self._free:
            oldest = next((slot for slot in self._order if slot not in self._holds), None)
            if oldest is None:
                raise OutOfStatesError(f"all {self.store.count} states are in use")
            self._evict(oldest)
        state = self._free.pop()
        self._used.add(state)
        return state

    def _evict(self, slot: int) -> None:
        self._forget(slot)
        self.evicted += 1

    def _forget(self, slot: int) -> None:
        self._free.append(int(self._after[slot]))
        self._after[slot] = _NONE
        self._passing.discard(slot)
        del self._order[slot]
