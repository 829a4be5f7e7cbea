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
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from midfill.arrays import BoolArray, Int32Array
from midfill.errors import InvalidRequestError
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CacheRoot, MethodRoot
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.contexts.method import ParallelMethod
from midfill.methods.sequence_method import (
    Admitted,
    Aspect,
    PlainLengths,
    Prefill,
    RequestFacts,
    SequenceMethod,
    SequenceRows,
    SequenceView,
)
from midfill.runners.forward.attention import AttentionPlan, KeyPart
from midfill.runners.forward.runner import Runner

_MAX_ENTRIES = 1024


class ParallelContexts(SequenceMethod):
    """A sequence's contexts.

    Attributes:
        method: the temperature and the scale.
        bounds: numbers of the first token of C_1, ..., C_N and Q; ascending.
        copied: by context, from 0, how many of its first tokens have had their KV copied since the
            sequence was admitted.
    """

    title = "the method that computes files apart"
    changes = frozenset({Aspect.ROOT, Aspect.POSITIONS})
    needs = frozenset({Aspect.ROWS, Aspect.CHUNKS})

    def __init__(
        self,
        method: ParallelMethod,
        bounds: SequenceOf[int],
        name: str = "",
        index: "ContextIndex | None" = None,
    ) -> None:
        """Begin with nothing copied.

        Args:
            method: see the class.
            bounds: at least two. Where nothing comes before the first context, its first token is
                the shared prefix.
            name: how requests name the method.
            index: where contexts are cached; None copies none.
        """
        self.name = name
        self.method = method
        self.bounds = tuple(sorted({max(bound, 1) for bound in bounds}))
        self.copied: dict[int, int] = {}
        self._index = index
        self._longest = max(end - start for start, end in pairwise(self.bounds))
        self._divided: _DividedPrefix | None = None

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
        return ParallelContexts(self.method, self.bounds, self.name, self._index)

    def root(self, tenant: str) -> CacheRoot:
        """See ``SequenceMethod``."""
        return MethodRoot(tenant, repr(self.method))

    def prefill(self, sequence: SequenceView) -> Prefill:
        """See ``SequenceMethod``."""
        return "chunks"

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``."""
        return self.chunk_end(sequence.computed)

    def admitted(self, sequence: SequenceView) -> Admitted:
        """See ``SequenceMethod``: copy the KV of contexts that are cached elsewhere."""
        assert sequence.kv is not None
        copied = 0
        if self._index is not None:
            copied = self._index.copy(
                self, self.root(sequence.tenant), sequence.tokens, sequence.kv, sequence.computed
            )
        return Admitted(self.skip(sequence.computed), copied)

    def committed(self, sequence: SequenceView) -> int:
        """See ``SequenceMethod``: note where contexts are, and go on after copied ones."""
        computed = sequence.computed
        if computed <= self.end:
            computed = self.skip(computed)
        if self._index is not None and computed <= sequence.prompt_length:
            root = self.root(sequence.tenant)
            self._index.record(self, root, sequence.tokens, computed)
        return computed

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

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        """See ``SequenceMethod``; no bound lies between the tokens."""
        kv = sequence.kv
        assert kv is not None
        if kv.prefix is not None:
            return self._over_cells(kv.prefix, rows)
        slots, after, numbers = kv.slots, self.end, rows.positions
        if first >= after:
            contexts = slots[self.first : after]
            others = np.concatenate((slots[: self.first], slots[after:end]))
            return self._weighed(KeyPart(contexts), None, rows._replace(kv_slots=others))
        if first < self.bounds[1]:
            return rows._replace(kv_slots=slots[:end])
        own = max(bound for bound in self.bounds if bound <= first)
        visible = np.concatenate((slots[: self.first], slots[own:end]))
        return rows._replace(positions=numbers - np.int32(own - self.first), kv_slots=visible)

    def _over_cells(self, prefix: CompressedPrefix, rows: SequenceRows) -> SequenceRows:
        """Return what rows attend to once cells stand for all contexts."""
        if prefix.gapless:
            raise ValueError("files that share positions can't be moved together")
        if self._divided is None or self._divided.prefix is not prefix:
            self._divided = _divide(prefix, self.first, self.end)
        nothing = np.zeros(0, np.int32)
        return self._weighed(KeyPart(nothing, self._divided.contexts), self._divided.others, rows)

    def _weighed(
        self, contexts: KeyPart, others: RaggedIndex | None, rows: SequenceRows
    ) -> SequenceRows:
        """Return rows after the contexts, which see these with a temperature and a scale.

        Args:
            contexts: their keys.
            others: cells of all other tokens; None if there are none.
            rows: see the other tokens' slots.
        """
        method, positions = self.method, rows.positions - np.int32(self.saved_positions)
        if method.temperature == method.scale == 1.0 and others is None:
            slots = np.concatenate((contexts.slots, rows.kv_slots))
            return rows._replace(positions=positions, kv_slots=slots)
        part = replace(contexts, temperature=method.temperature, scale=method.scale)
        return rows._replace(positions=positions, plan=AttentionPlan(others, parts=(part,)))

    def cache_keys(self, tokens: Int32Array) -> Int32Array:
        """Return what the prefix cache knows a sequence's first tokens by: [n] int32."""
        keys = tokens.copy()
        marked = [bound for bound in self.bounds if bound < len(keys)]
        keys[marked] = -1 - keys[marked]
        return keys


class _DividedPrefix(NamedTuple):
    """The cells of contexts, and all others, of a compressed prefix."""

    prefix: CompressedPrefix
    contexts: RaggedIndex
    others: RaggedIndex


def _divide(prefix: CompressedPrefix, first: int, end: int) -> _DividedPrefix:
    """Divide a prefix's cells into those of the tokens first <= i < end, and all others."""
    inside: BoolArray = (prefix.numbers >= first) & (prefix.numbers < end)
    return _DividedPrefix(prefix, prefix.index.take(inside), prefix.index.take(~inside))


class _IndexEntry(NamedTuple):
    """Where a context's KV may be cached.

    Attributes:
        keys: [n] int32, what the cache knows the tokens up to its end by.
        start: number of its first token there.
    """

    keys: Int32Array
    start: int


class ContextIndex:
    """Where contexts were computed last, of all tenants; the oldest are forgotten.

    Args:
        runner: holds the KV.
        pool: the runner's slots.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self._cache, self._cells, self._slots = pool.cache, runner.cells, runner.slots
        self._heads = runner.config.layers * runner.config.kv_heads
        self._entries: OrderedDict[tuple[CacheRoot, bytes], _IndexEntry] = OrderedDict()

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
                self._entries[root, digest] = _IndexEntry(keys[:stop], start)
                self._entries.move_to_end((root, digest))
        while len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)

    def _find(self, root: CacheRoot, prefix: Int32Array, context: Int32Array) -> Int32Array:
        """Return the slots of a context's first tokens: all, all but the last, or none."""
        for count in (len(context), len(context) - 1):
            entry = self._entries.get((root, _digest(prefix, context[:count])))
            if entry is None or not count:
                continue
            slots = self._cache.find(root, entry.keys)
            if len(slots) == len(entry.keys):
                return slots[entry.start :]
        return np.zeros(0, np.int32)


class ContextKind(PlainLengths):
    """Puts methods to work that compute files apart from each other."""

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self._index = ContextIndex(runner, pool)

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``."""
        if not isinstance(method, ParallelMethod) or len(request.contexts) < 2:
            return None
        _check(request)
        return ParallelContexts(method, request.contexts, name, self._index)

    def max_length(self, methods: SequenceOf[object], request: RequestFacts, most: int) -> int:
        """See ``MethodKind.max_length``: files share positions."""
        found = [method for method in methods if isinstance(method, ParallelMethod)]
        if not found or len(request.contexts) < 2:
            return most
        return most + ParallelContexts(found[0], request.contexts).saved_positions


def _check(request: RequestFacts) -> None:
    """Refuse a request whose files can't be computed apart from each other.

    Raises:
        InvalidRequestError: the files are not within the prompt's part that is seen by methods, or
            its tokens are to be scored.
    """
    bounds, count = request.contexts, request.compress_after
    ascending = all(a <= b for a, b in pairwise(bounds))
    if not ascending or not bounds[0] >= 0 or not 1 < bounds[-1] < count:
        raise InvalidRequestError(
            f"contexts must be ascending and end before the prompt's last token, {count - 1}",
            param="contexts",
        )
    if request.scores_prompt:
        raise InvalidRequestError(
            "a method that computes files apart from each other scores no prompt",
            param="prompt_logprobs",
        )


def _digest(prefix: Int32Array, context: Int32Array) -> bytes:
    digest = hashlib.sha256(len(prefix).to_bytes(8, "little"))
    digest.update(prefix.tobytes())
    digest.update(context.tobytes())
    return digest.digest()
