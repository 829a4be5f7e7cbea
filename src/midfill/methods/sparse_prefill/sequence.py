"""SparsePrefill: a method of sparse prefill at work on one sequence, and what it has computed.

Chunks end at multiples of the method's size, counted from the prompt's first token, and where the
part of the prompt ends that the method sees. One that the method lists runs in one step, whatever
the token budget. Whole chunks are shared through the prefix cache, under a root of the method's
own; the rest of the prompt, and the answer, attended to approximate KV and are not.

What a chunk computes depends on all of its tokens, so one whose tokens differ at the end shares
nothing with it. The cache, which compares token by token, therefore sees the number of the chunk in
the place of its first token.
"""

import hashlib
from collections import OrderedDict
from dataclasses import replace

from midfill.arrays import Int32Array, Int64Array
from midfill.kv.radix_cache import CacheRoot, MethodRoot
from midfill.methods.sequence_method import (
    Aspect,
    PlainLengths,
    Prefill,
    RequestFacts,
    SequenceMethod,
    SequenceRows,
    SequenceView,
)
from midfill.methods.sparse_prefill.method import PrefillMethod
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import AttentionPlan, KeyPairs, LayerProbe, SpanLists

_MAX_NUMBERS = 4096


class ChunkNumbers:
    """Numbers chunks by all tokens up to their ends. The longest unused ones are forgotten."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0

    def keys(self, tokens: Int32Array, size: int) -> Int32Array:
        """Return what the prefix cache is to compare in the place of a prompt's tokens.

        Args:
            tokens: [n] int32.
            size: tokens per chunk.

        Returns:
            [tokens in whole chunks] int32: the tokens, but the first of each chunk stands for the
            chunk and those before it, by a number that is no token.
        """
        keys = tokens[: len(tokens) // size * size].copy()
        digest = hashlib.sha256()
        for start in range(0, len(keys), size):
            digest.update(tokens[start : start + size].tobytes())
            keys[start] = -1 - self._number(digest.digest())
        return keys

    def _number(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = self._next
            self._next += 1
            if len(self._numbers) > _MAX_NUMBERS:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(digest)
        return number


class SparsePrefill(SequenceMethod):
    """A sequence's method and its chunks.

    Args:
        name: how requests name the method.
        method: lists the keys.
        tokens: [n] int32, those of the prompt's tokens that it sees; what follows attends to
            everything.
        numbers: of chunks that have been seen.
        pairs: what is computed is added to it.
    """

    title = "the method of sparse prefill"
    changes = frozenset({Aspect.ROOT, Aspect.LISTS})
    needs = frozenset({Aspect.ROWS, Aspect.CHUNKS, Aspect.POSITIONS})

    def __init__(
        self,
        name: str,
        method: PrefillMethod,
        tokens: Int32Array,
        numbers: ChunkNumbers,
        pairs: KeyPairs,
    ) -> None:
        self.name = name
        self._method = method
        self._tokens = len(tokens)
        self._keys = numbers.keys(tokens, method.chunk_tokens)
        self._pairs = pairs

    @property
    def lists_any(self) -> bool:
        """Whether the method lists any chunk; otherwise the prompt is computed exactly."""
        return any(self.atomic_tokens(start) for start in range(0, self._tokens, self._size))

    @property
    def _size(self) -> int:
        return self._method.chunk_tokens

    def root(self, tenant: str) -> CacheRoot:
        """See ``SequenceMethod``."""
        return MethodRoot(tenant, self._method.variant)

    def cache_keys(self, tokens: Int32Array) -> Int32Array:
        """See ``SequenceMethod``: what the cache knows the whole chunks of the tokens by."""
        return self._keys[: self.usable(len(tokens))]

    def usable(self, cached: int) -> int:
        """See ``SequenceMethod``: only whole chunks; the cache may hold more that begins alike."""
        return min(cached, self._tokens) // self._size * self._size

    def prefill(self, sequence: SequenceView) -> Prefill:
        """See ``SequenceMethod``."""
        return "chunks"

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``."""
        return self._chunk_end(sequence.computed)

    def atomic_tokens(self, computed: int) -> int:
        """See ``SequenceMethod``: what the method lists next."""
        start, end = computed // self._size * self._size, self._chunk_end(computed)
        if end is None or self._method.is_dense(start, end - start):
            return 0
        return end - computed

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        """See ``SequenceMethod``.

        Raises:
            ValueError: a part of a chunk was to run.
        """
        tokens = self.atomic_tokens(first)
        if not tokens:
            return rows
        if end - first != tokens:
            raise ValueError(f"a chunk of {tokens} tokens can't run {end - first} of them")
        lister = ChunkLister(self._method, self._pairs)
        return rows._replace(plan=replace(rows.plan or AttentionPlan(), lister=lister))

    def shares_slots(self, is_compressed: bool) -> bool:
        """See ``SequenceMethod``: the prompt's last part isn't shared, unless it was compressed."""
        return is_compressed

    def _chunk_end(self, computed: int) -> int | None:
        """Return where the chunk ends that begins at ``computed``; None after the last one."""
        if computed >= self._tokens:
            return None
        return min((computed // self._size + 1) * self._size, self._tokens)


class SparsePrefillKind(PlainLengths):
    """Puts methods of sparse prefill to work.

    Args:
        config: the model.

    Attributes:
        pairs: what was computed of prompts' attention.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._numbers = ChunkNumbers()
        self.pairs = KeyPairs(config)

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``."""
        if not isinstance(method, PrefillMethod):
            return None
        tokens = sequence.tokens[: request.compress_after]
        sparse = SparsePrefill(name, method, tokens, self._numbers, self.pairs)
        return sparse if sparse.lists_any else None


class ChunkLister:
    """Implements ``runners.forward.attention.KeyLister`` for one chunk.

    Args:
        method: lists the keys.
        pairs: what is computed is added to it.
    """

    def __init__(self, method: PrefillMethod, pairs: KeyPairs) -> None:
        self._method = method
        self._pairs = pairs

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``KeyLister.plan``."""
        self._pairs.causal[probe.layer] += probe.rows * probe.first + (
            probe.rows * (probe.rows + 1) // 2
        )
        return self._method.plan(probe)

    def record(self, layer: int, pairs: Int64Array) -> None:
        """See ``KeyLister.record``."""
        self._pairs.computed[layer] += pairs
