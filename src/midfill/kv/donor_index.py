"""DonorIndex: where spans of a prompt stand in cached text, at any position and behind any text.

The prefix cache finds the beginning of a prompt. This finds the rest of it: text that has moved,
or stands behind other text. A rolling hash of some tokens, after Karp and Rabin ("Efficient
Randomized Pattern-Matching Algorithms", IBM Journal of Research and Development 1987), says where a
span may be; a comparison of all its tokens says whether it is there.

The index follows the cache: it is told of every token that is cached or evicted. It knows tokens
by their slots, which neither splits nor growth of the tree's nodes change, so its memory is bounded
by the pool's size: 38 bytes per slot, and 12 for each length of windows that was asked for.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from midfill.arrays import BoolArray, Int32Array, Int64Array
from midfill.kv.radix_cache import CacheRoot

_WINDOWS = (16, 8, 4, 2, 1)
_MAX_PLACES = 16  # so that a text of one token, repeated, takes no time
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a token is lost
_SEED = np.uint64(0x2545F4914F6CDD1D)
_NONE = -1


class DonorSpan(NamedTuple):
    """Consecutive tokens of a prompt that are cached in the same order.

    Attributes:
        start: number of the span's first token in the prompt.
        position: of the same token where it is cached.
        slots: [n] int32, the slots of the tokens' KV.
    """

    start: int
    position: int
    slots: Int32Array

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.slots)

    @property
    def end(self) -> int:
        """Number of the first token after the span, in the prompt."""
        return self.start + len(self.slots)

    @property
    def shift(self) -> int:
        """By how many positions the span has moved."""
        return self.start - self.position


class CachedText(NamedTuple):
    """Consecutive cached tokens.

    Attributes:
        tokens: [n] int32.
        slots: [n] int32, the slots of their KV.
        position: of the first one.
    """

    tokens: Int32Array
    slots: Int32Array
    position: int


class DonorIndex:
    """The tokens of all cached text, by slot and by hash; implements ``CacheWatcher``.

    Nothing it returns is locked: slots are the tokens' until the next call that may evict.

    Args:
        slots: size of the pool.
    """

    def __init__(self, slots: int) -> None:
        self._tokens: Int32Array = np.zeros(slots, np.int32)
        self._before: Int32Array = np.full(slots, _NONE, np.int32)
        self._after: Int32Array = np.full(slots, _NONE, np.int32)
        self._positions: Int32Array = np.zeros(slots, np.int32)
        self._owners: Int64Array = np.full(slots, _NONE, np.int64)
        self._stamps: Int64Array = np.zeros(slots, np.int64)
        self._is_new: BoolArray = np.zeros(slots, bool)
        self._is_gone: BoolArray = np.zeros(slots, bool)
        self._clock = 0
        self._roots: dict[CacheRoot, int] = {}
        self._held: dict[int, int] = {}
        self._names: dict[int, CacheRoot] = {}
        self._next_root = 0
        self._tables: dict[int, _Table] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the index, in bytes."""
        arrays = (
            self._tokens, self._before, self._after, self._positions, self._owners, self._stamps,
            self._is_new, self._is_gone,
        )  # fmt: skip
        tables = sum(table.hashes.nbytes + table.slots.nbytes for table in self._tables.values())
        return sum(array.nbytes for array in arrays) + tables

    # --- what the cache tells

    def added(self, root: CacheRoot, tokens: Int32Array, slots: Int32Array, after: int) -> None:
        """See ``CacheWatcher.added``."""
        owner = self._owner(root)
        self._held[owner] += len(slots)
        self._tokens[slots] = tokens
        self._owners[slots] = owner
        self._before[slots[1:]] = slots[:-1]
        self._after[slots[:-1]] = slots[1:]
        self._before[slots[0]], self._after[slots[-1]] = after, _NONE
        first = 0
        if after != _NONE:
            self._after[after] = slots[0]
            first = int(self._positions[after]) + 1
        self._positions[slots] = np.arange(first, first + len(slots))
        self._stamps[slots] = np.arange(self._clock + 1, self._clock + 1 + len(slots))
        self._clock += len(slots)
        self._is_new[slots] = True

    def removed(self, slots: Int32Array) -> None:
        """See ``CacheWatcher.removed``."""
        self._is_gone[slots] = True
        self._is_new[slots] = False
        before = self._before[slots]
        leads_here = (before != _NONE) & (self._after[before] == slots)
        self._after[before[leads_here]] = _NONE
        owners, counts = np.unique(self._owners[slots], return_counts=True)
        self._owners[slots] = _NONE
        self._stamps[slots] = 0
        for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
            self._held[owner] -= count
            if not self._held[owner]:
                del self._held[owner]
                del self._roots[self._names.pop(owner)]

    def _owner(self, root: CacheRoot) -> int:
        owner = self._roots.get(root)
        if owner is None:
            owner = self._roots[root] = self._next_root
            self._names[owner], self._held[owner] = root, 0
            self._next_root += 1
        return owner

    # --- single tokens

    def stamp(self, slot: int) -> int:
        """Return a number of the token that a slot holds; 0: none. No two tokens have the same."""
        return int(self._stamps[slot])

    def text_ending(self, slot: int, count: int) -> CachedText | None:
        """Return the ``count`` tokens that end with a cached one; None if there aren't as many."""
        if count < 1 or self._owners[slot] == _NONE:
            return None
        slots = self._walk(slot, count)
        if len(slots) < count:
            return None
        return CachedText(self._tokens[slots], slots, int(self._positions[slots[0]]))

    def text_up_to(self, slot: int) -> CachedText:
        """Return all tokens of its tree that lead to a cached one, and that."""
        slots = self._walk(slot, int(self._positions[slot]) + 1)
        return CachedText(self._tokens[slots], slots, int(self._positions[slots[0]]))

    def text_through(self, slot: int) -> CachedText:
        """Return the whole text that a cached token stands in; the latest where it goes on
        differently."""
        slots = self._walk(slot, int(self._positions[slot]) + 1)
        later = []
        while (slot := int(self._after[slot])) != _NONE:
            later.append(slot)
        slots = np.concatenate((slots, np.array(later, np.int32)))
        return CachedText(self._tokens[slots], slots, int(self._positions[slots[0]]))

    def root_of(self, slot: int) -> CacheRoot | None:
        """Return the tree that holds a slot; None if none does."""
        return self._names.get(int(self._owners[slot]))

    def _walk(self, slot: int, most: int) -> Int32Array:
        """Return at most so many slots that lead to one, which is the last."""
        found, before = [slot], self._before
        while len(found) < most and (slot := int(before[slot])) != _NONE:
            found.append(slot)
        return np.array(found[::-1], np.int32)

    # --- spans

    def find(
        self, root: CacheRoot, tokens: Int32Array, start: int, min_length: int
    ) -> list[DonorSpan]:
        """Return spans of [n] int32 ``tokens`` that stand in a tree's text, in order.

        From ``start`` on, the longest span that begins at a token is taken; among equally long ones
        that which was cached last. The search goes on after it, or at the next token if none has as
        many as ``min_length``. Spans don't overlap. A text's first token is never part of a span:
        models attend to it from everywhere, and its KV suits no other place. Of a window of tokens
        that is cached in more places than 16, the last 16 count.

        Args:
            root: the tree: a tenant, for that one's exact KV.
            tokens: a prompt.
            start: the first token to find.
            min_length: of a span; at least 1.
        """
        owner = self._roots.get(root)
        start = max(start, 1)
        if owner is None or min_length < 1 or len(tokens) - start < min_length:
            return []
        window = next(size for size in _WINDOWS if size <= min_length)
        pairs = self._matches(owner, tokens[start:], window)
        if not len(pairs.ends):
            return []
        spans = []
        for first, end, slot in _longest_first(self._runs(pairs), min_length):
            slots = self._walk(slot, end - first)
            spans.append(DonorSpan(start + first, int(self._positions[slots[0]]), slots))
        return spans

    def _matches(self, owner: int, tokens: Int32Array, window: int) -> "_Matches":
        """Return all places of each of the tokens' windows, compared token by token."""
        table = self._table(window)
        wanted = _fingerprints(tokens, window, owner)
        first = np.searchsorted(table.hashes, wanted, side="left")
        end = np.searchsorted(table.hashes, wanted, side="right")
        counts = np.minimum(end - first, _MAX_PLACES)
        ends = np.repeat(np.arange(window - 1, len(tokens)), counts)
        nth = np.arange(len(ends)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = table.slots[np.repeat(end - counts, counts) + nth]
        same = (self._owners[slots] == owner) & (self._positions[slots] >= window)
        at = slots
        for back in range(window):
            same &= self._tokens[at] == tokens[ends - back]
            at = self._before[at]
        return _Matches(ends[same], slots[same], window)

    def _runs(self, pairs: "_Matches") -> list[tuple[int, int, int, int]]:
        """Return the longest runs that matches make: first token, end, stamp and slot of the last.

        A match goes on from another one if it ends one token later, in the prompt and in the cache.
        """
        size = len(self._tokens)
        keys = pairs.ends.astype(np.int64) * size + pairs.slots
        order = np.argsort(keys)
        keys, ends, slots = keys[order], pairs.ends[order], pairs.slots[order]
        earlier = np.where(
            self._before[slots] == _NONE, _NONE, (ends - 1) * size + self._before[slots]
        )
        place = np.minimum(np.searchsorted(keys, earlier), len(keys) - 1)
        goes_on = keys[place] == earlier
        is_last = np.ones(len(keys), bool)
        is_last[place[goes_on]] = False
        first = np.where(goes_on, place, np.arange(len(keys)))
        while True:  # double the distance that each match looks back
            further = first[first]
            if (further == first).all():
                break
            first = further
        firsts = ends[first[is_last]] - (pairs.window - 1)
        last = slots[is_last]
        columns = (firsts, ends[is_last] + 1, self._stamps[last], last)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _table(self, window: int) -> "_Table":
        """Return the hashes of all windows of a length, once they are up to date."""
        if self._is_gone.any() or self._is_new.any():
            new = np.flatnonzero(self._is_new).astype(np.int32)
            for size, table in self._tables.items():
                self._tables[size] = table.updated(self._is_gone, self._hashed(new, size))
            self._is_gone[:] = self._is_new[:] = False
        if window not in self._tables:
            every = np.flatnonzero(self._owners != _NONE).astype(np.int32)
            nothing = _Table(np.zeros(0, np.uint64), np.zeros(0, np.int32))
            self._tables[window] = nothing.updated(self._is_gone, self._hashed(every, window))
        return self._tables[window]

    def _hashed(self, slots: Int32Array, window: int) -> "_Table":
        """Return the hashes of the windows that end with some slots, where they are long enough."""
        slots = slots[self._positions[slots] >= window]
        slots = slots[np.argsort(self._stamps[slots])]
        numbers = self._owners[slots].astype(np.uint64)
        at, hashes = slots, (numbers + _SEED) * _FACTOR
        for _ in range(window):
            hashes = hashes * _FACTOR + _mixed(self._tokens[at])
            at = self._before[at]
        return _Table(hashes, slots)


class _Matches(NamedTuple):
    """Windows of a prompt's tokens that are cached: number of their last token, and its slot."""

    ends: Int64Array
    slots: Int32Array
    window: int


class _Table(NamedTuple):
    """Windows by hash, ascending; of equal hashes, those cached last come last.

    Attributes:
        hashes: [n] uint64.
        slots: [n] int32, of the windows' last tokens.
    """

    hashes: NDArray[np.uint64]
    slots: Int32Array

    def updated(self, is_gone: BoolArray, new: "_Table") -> "_Table":
        """Return the table without slots that are gone, and with new ones."""
        stay = ~is_gone[self.slots]
        hashes = np.concatenate((self.hashes[stay], new.hashes))
        slots = np.concatenate((self.slots[stay], new.slots))
        order = np.argsort(hashes, kind="stable")
        return _Table(hashes[order], slots[order])


def _mixed(tokens: Int32Array) -> NDArray[np.uint64]:
    numbers = (tokens.astype(np.int64).astype(np.uint64) + _SEED) * _FACTOR
    mixed: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(29))
    return mixed


def _fingerprints(tokens: Int32Array, window: int, owner: int) -> NDArray[np.uint64]:
    """Return a number per window of an owner's text, as ``DonorIndex._hashed`` does.

    Equal windows have equal numbers. Others may collide, so whoever finds one compares the tokens.

    Returns:
        [n - window + 1] uint64, by the windows' last tokens.
    """
    count = len(tokens) - window + 1
    numbers = _mixed(tokens)
    hashes = np.full(count, owner, np.uint64)
    hashes = (hashes + _SEED) * _FACTOR
    for back in range(window):
        last = window - 1 - back
        hashes = hashes * _FACTOR + numbers[last : last + count]
    return hashes


def _longest_first(
    runs: list[tuple[int, int, int, int]], min_length: int
) -> list[tuple[int, int, int]]:
    """Divide a prompt into the longest runs from left to right: first token, end, last slot."""
    runs.sort()
    taken: list[tuple[int, int, int]] = []
    at, seen, best = 0, 0, (0, 0, 0)
    while True:
        while seen < len(runs) and runs[seen][0] <= at:
            best = max(best, runs[seen][1:])
            seen += 1
        if best[0] - at >= min_length:
            taken.append((at, best[0], best[2]))
            at = best[0]
        elif seen < len(runs):
            at = runs[seen][0]
        else:
            return taken
