"""Parallel contexts: files that a prompt shows, computed apart, and copied where they are cached.

A sequence's slots are in the order of its tokens: the shared prefix P, the contexts C_1 to C_N, and
the rest Q. Rows of a context see P and their own context, rows of Q see everything. Every context
begins at the position after P, and Q after the longest one. A context's KV thus depends on P and
itself alone, so it is copied, bit for bit, from wherever the same tokens stand after the same P.

All of it goes to a tree of the prefix cache of the method's own, in which the first token after
each bound stands for that as well: the same text, divided otherwise, has other KV.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.radix_cache import RadixCache
from midfill.kv.radix_node import CacheRoot
from midfill.kv.ragged import cells_of_slots
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.contexts.method import ParallelMethod
from midfill.runners.forward.cells import CellStore
from midfill.runners.forward.groups import KeyGroup
from midfill.runners.forward.runner import Runner

_MAX_PLACES = 1024


class ContextRows(NamedTuple):
    """What some rows of a sequence see.

    Attributes:
        positions: [rows] int32.
        kv_slots: [n] int32, which end with the rows' own.
        group: the contexts among these, if the rows come after them.
    """

    positions: Int32Array
    kv_slots: Int32Array
    group: KeyGroup | None


class ParallelContexts:
    """A sequence's contexts.

    Attributes:
        method: the temperature and the scale.
        bounds: numbers of the first token of C_1, ..., C_N and Q; ascending.
        copied: by context, from 0, how many of its first tokens have had their KV copied since the
            sequence was admitted.
    """

    def __init__(self, method: ParallelMethod, bounds: SequenceOf[int]) -> None:
        """Begin with nothing copied.

        Args:
            method: see the class.
            bounds: at least two. Where nothing comes before the first context, its first token is
                the shared prefix.
        """
        self.method = method
        self.bounds = tuple(sorted({max(bound, 1) for bound in bounds}))
        self.copied: dict[int, int] = {}
        self._longest = max(end - start for start, end in pairwise(self.bounds))

    @property
    def first(self) -> int:
        """Number of the first context's first token."""
        return self.bounds[0]

    @property
    def end(self) -> int:
        """Number of the first token after the contexts."""
        return self.bounds[-1]

    @property
    def saved_positions(self) -> int:
        """By how much the positions of what follows are lower than the tokens' numbers."""
        return self.end - self.first - self._longest

    def spans(self) -> list[tuple[int, int]]:
        """Return each context's first token and the one after its last."""
        return list(pairwise(self.bounds))

    def restart(self) -> None:
        """Begin again, since the sequence holds no KV any more."""
        self.copied = {}

    def fork(self) -> "ParallelContexts":
        """Return the contexts of another answer to the same prompt."""
        return ParallelContexts(self.method, self.bounds)

    def chunk_end(self, computed: int) -> int | None:
        """Return the token that a step must not go beyond; None after the contexts."""
        if computed < self.first:  # the first context is computed on as if it were a part of P
            return self.first if self.copied.get(0) else self.bounds[1]
        return next((end for end in self.bounds if end > computed), None)

    def skip(self, computed: int) -> int:
        """Return the next token whose KV is not there, given that the first ``computed`` are."""
        for number, (start, _) in enumerate(self.spans()):
            if start <= computed < start + self.copied.get(number, 0):
                computed = start + self.copied[number]
        return computed

    def rows(self, slots: Int32Array, start: int, end: int) -> ContextRows:
        """Return what the rows start <= i < end see, which no bound divides.

        Args:
            slots: [at least end] int32, the sequence's.
            start, end: token numbers.
        """
        first, after = self.first, self.end
        numbers = np.arange(start, end, dtype=np.int32)
        if start >= after:
            visible = np.concatenate((slots[first:after], slots[:first], slots[after:end]))
            method = self.method
            neutral = method.temperature == method.scale == 1.0
            group = KeyGroup(after - first, method.temperature, method.scale)
            shift = np.int32(self.saved_positions)
            return ContextRows(numbers - shift, visible, None if neutral else group)
        if start < self.bounds[1]:
            return ContextRows(numbers, slots[:end], None)
        own = max(bound for bound in self.bounds if bound <= start)
        visible = np.concatenate((slots[:first], slots[own:end]))
        return ContextRows(numbers - np.int32(own - first), visible, None)

    def cache_keys(self, tokens: Int32Array) -> Int32Array:
        """Return what the prefix cache knows a sequence's first tokens by: [n] int32."""
        keys = tokens.copy()
        marked = [bound for bound in self.bounds if bound < len(keys)]
        keys[marked] = -1 - keys[marked]
        return keys


class _Place(NamedTuple):
    """Where a context's KV may be cached.

    Attributes:
        keys: [n] int32, what the cache knows the tokens up to its end by.
        start: number of its first token there.
    """

    keys: Int32Array
    start: int


class ContextPlaces:
    """Where contexts were computed last, of all tenants; the oldest are forgotten.

    Args:
        cache: where they are cached.
        cells: the KV cache.
        heads: layers * kv_heads.
        slots: of the KV cache.
    """

    def __init__(self, cache: RadixCache, cells: CellStore, heads: int, slots: int) -> None:
        self._cache, self._cells, self._heads, self._slots = cache, cells, heads, slots
        self._places: OrderedDict[tuple[CacheRoot, bytes], _Place] = OrderedDict()

    @classmethod
    def of_runner(cls, runner: Runner, cache: RadixCache) -> "ContextPlaces":
        """Return the places in a runner's KV cache."""
        config = runner.config
        return cls(cache, runner.cells, config.layers * config.kv_heads, runner.slots)

    def copy(
        self,
        contexts: ParallelContexts,
        root: CacheRoot,
        tokens: Int32Array,
        kv: SequenceKV,
        computed: int,
    ) -> int:
        """Copy the KV of the contexts of a sequence that was just admitted, as far as it is found.

        Args:
            contexts: its contexts; they note what was copied.
            root: the tree of the cache that it shares.
            tokens: [n] int32, its prompt.
            kv: it holds slots for all of them.
            computed: how many of the first tokens have their KV.

        Returns:
            Number of tokens whose KV was copied.
        """
        copied = 0
        for number, (start, end) in enumerate(contexts.spans()):
            begin = max(start, computed)
            found = self._find(root, tokens[: contexts.first], tokens[start:end])
            if start + len(found) <= begin:
                continue
            target = kv.slots[begin : start + len(found)]
            source = cells_of_slots(found[begin - start :], self._heads, self._slots).reshape(-1)
            stored = self._cells.take(source)
            self._cells.put(cells_of_slots(target, self._heads, self._slots).reshape(-1), stored)
            contexts.copied[number] = len(found)
            copied += len(target)
        return copied

    def record(
        self, contexts: ParallelContexts, root: CacheRoot, tokens: Int32Array, computed: int
    ) -> None:
        """Note where the contexts among a sequence's first ``computed`` tokens are."""
        keys = contexts.cache_keys(tokens[: contexts.end])
        for start, end in contexts.spans():
            if end > computed:
                break
            # The last token separates it from what follows, and may be another one elsewhere.
            for stop in (end, end - 1):
                digest = _digest(tokens[: contexts.first], tokens[start:stop])
                self._places[root, digest] = _Place(keys[:stop], start)
                self._places.move_to_end((root, digest))
        while len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)

    def _find(self, root: CacheRoot, prefix: Int32Array, context: Int32Array) -> Int32Array:
        """Return the slots of a context's first tokens: all, all but the last, or none."""
        for count in (len(context), len(context) - 1):
            place = self._places.get((root, _digest(prefix, context[:count])))
            if place is None or not count:
                continue
            slots = self._cache.find(root, place.keys)
            if len(slots) == len(place.keys):
                return slots[place.start :]
        return np.zeros(0, np.int32)


def _digest(prefix: Int32Array, context: Int32Array) -> bytes:
    digest = hashlib.sha256(len(prefix).to_bytes(8, "little"))
    digest.update(prefix.tobytes())
    digest.update(context.tobytes())
    return digest.digest()
