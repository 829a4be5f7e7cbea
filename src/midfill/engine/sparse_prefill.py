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

import numpy as np

from midfill.arrays import Int32Array, Int64Array
from midfill.methods.sparse_prefill.method import PrefillMethod
from midfill.models.config import ModelConfig
from midfill.runners.forward.sparse import LayerProbe, SpanLists

_MAX_NUMBERS = 4096


class KeyPairs:
    """Counts products of queries with keys in chunks that a method has listed.

    Attributes:
        computed: [layers, query_heads] int64, those that were computed.
        causal: [layers] int64, those that dense attention has per query head for the same rows.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.computed: Int64Array = np.zeros((config.layers, config.query_heads), np.int64)
        self.causal: Int64Array = np.zeros(config.layers, np.int64)

    @property
    def totals(self) -> tuple[int, int]:
        """Return what was computed and what dense attention has, in all layers and heads."""
        return int(self.computed.sum()), int(self.causal.sum()) * self.computed.shape[1]


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


class SparsePrefill:
    """A sequence's method and its chunks.

    Args:
        method: lists the keys.
        tokens: [n] int32, those of the prompt's tokens that it sees; what follows attends to
            everything.
        numbers: of chunks that have been seen.
        pairs: what is computed is added to it.
    """

    def __init__(
        self, method: PrefillMethod, tokens: Int32Array, numbers: ChunkNumbers, pairs: KeyPairs
    ) -> None:
        self._method = method
        self._tokens = len(tokens)
        self._keys = numbers.keys(tokens, method.chunk_tokens)
        self._pairs = pairs

    @property
    def lists_any(self) -> bool:
        """Whether the method lists any chunk; otherwise the prompt is computed exactly."""
        return any(self.listed_chunk(start) for start in range(0, self._tokens, self._size))

    @property
    def _size(self) -> int:
        return self._method.chunk_tokens

    @property
    def variant(self) -> str:
        """See ``PrefillMethod.variant``."""
        return self._method.variant

    def chunk_end(self, computed: int) -> int | None:
        """Return where the chunk ends that begins at ``computed``; None after the last one."""
        if computed >= self._tokens:
            return None
        return min((computed // self._size + 1) * self._size, self._tokens)

    def cache_keys(self, computed: int) -> Int32Array:
        """Return what the prefix cache knows the whole chunks of so many tokens by, a view."""
        return self._keys[: min(computed, self._tokens) // self._size * self._size]

    def listed_chunk(self, computed: int) -> int:
        """Return how many tokens the method lists next, in one step; 0 if it lists none."""
        start, end = computed // self._size * self._size, self.chunk_end(computed)
        if end is None or self._method.is_dense(start, end - start):
            return 0
        return end - computed

    def planner(self, computed: int, rows: int) -> "ChunkPlanner | None":
        """Return what lists the keys of a step's rows; None where they attend to everything."""
        listed = self.listed_chunk(computed)
        if not listed:
            return None
        if rows != listed:
            raise ValueError(f"a chunk of {listed} tokens can't run {rows} of them")
        return ChunkPlanner(self._method, self._pairs)


class ChunkPlanner:
    """Implements ``runners.forward.sparse.SparsePlanner`` for one chunk.

    Args:
        method: lists the keys.
        pairs: what is computed is added to it.
    """

    def __init__(self, method: PrefillMethod, pairs: KeyPairs) -> None:
        self._method = method
        self._pairs = pairs

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``SparsePlanner.plan``."""
        self._pairs.causal[probe.layer] += probe.rows * probe.first + (
            probe.rows * (probe.rows + 1) // 2
        )
        return self._method.plan(probe)

    def record(self, layer: int, pairs: Int64Array) -> None:
        """See ``SparsePlanner.record``."""
        self._pairs.computed[layer] += pairs
