"""Accumulated attention: what each key has received from all of a sequence's rows so far.

The scores of H2O and of KVMerger, and of ZipCache, which adds up some of the rows. Rows are
observed block by block, so that their queries need not be kept. What the rows of a prompt's
beginning have attended to is remembered, so that the next keystroke's prompt finds its beginning in
the cache.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Self

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.window_attention import received_attention

BLOCK = 64
"""Rows whose attention is added up at a time."""

_MAX_BYTES = 64 << 20


def block_digests(tokens: Int32Array, block: int, tenant: str) -> list[bytes]:
    """Return digests of a prompt's beginnings, one per whole block before its last token.

    Args:
        tokens: [n] int32, the prompt.
        block: tokens of a block.
        tenant: whose prompt it is; equal prompts of others have other digests.
    """
    running = blake2b(tenant.encode(errors="surrogatepass"), digest_size=16)
    running.update(b"\0")
    digests = []
    for end in range(block, len(tokens), block):
        running.update(tokens[end - block : end].tobytes())
        digests.append(running.copy().digest())
    return digests


class ObservationMemory:
    """Scores of keys by digest; what was used least recently goes first.

    Args:
        max_bytes: of all scores.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._scores: OrderedDict[bytes, list[Float32Array]] = OrderedDict()

    def longest(self, digests: Sequence[bytes]) -> tuple[int, list[Float32Array]]:
        """Return how many blocks are known of a prompt, and the scores after them; (0, []): none.

        Args:
            digests: of the prompt's blocks, see ``block_digests``.
        """
        for place in reversed(range(len(digests))):
            found = self._scores.get(digests[place])
            if found is not None:
                self._scores.move_to_end(digests[place])
                return place + 1, found
        return 0, []

    def remember(self, digest: bytes, scores: list[Float32Array]) -> None:
        """Keep the scores after some block; nobody may change them."""
        if digest in self._scores:
            self._scores.move_to_end(digest)
            return
        self._scores[digest] = scores
        self._bytes += _size(scores)
        while self._bytes > self._max_bytes:
            _, dropped = self._scores.popitem(last=False)
            self._bytes -= _size(dropped)


def _size(scores: list[Float32Array]) -> int:
    return sum(each.nbytes for each in scores)


@dataclass
class AccumulatedAttention:
    """The scores of one sequence's keys.

    Attributes:
        memory: where the scores of prompts' beginnings are kept.
        scores: [n] float32 for each layer and head: the attention that keys have received, summed
            over rows and over the query heads of the KV head.
        digests: of the prompt's blocks; none if they are not to be remembered.
    """

    memory: ObservationMemory
    scores: list[Float32Array] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    @classmethod
    def recall(cls, memory: ObservationMemory, tokens: Int32Array, tenant: str) -> tuple[int, Self]:
        """Return how many of a prompt's rows the memory knows, and what its keys have from them.

        Args:
            memory: of earlier prompts.
            tokens: [n] int32, the prompt.
            tenant: whose it is.
        """
        digests = block_digests(tokens, BLOCK, tenant)
        blocks, scores = memory.longest(digests)
        return blocks * BLOCK, cls(memory, scores, digests)

    def fork(self) -> "AccumulatedAttention":
        """Return the scores for another answer to the same prompt."""
        return AccumulatedAttention(self.memory, list(self.scores))

    def observe(
        self, keys: SequenceKeys, queries: Float32Array, rows: Int32Array | None = None
    ) -> None:
        """Add the attention of a block of the prompt, and remember the scores after it.

        Args:
            keys, queries: see ``SequenceCompressor.observe``.
            rows: see ``add``.
        """
        self.add(keys, queries, rows)
        if self.digests:
            block = int(keys.counts[0]) // BLOCK - 1
            self.memory.remember(self.digests[block], self.remembered())

    def remembered(self) -> list[Float32Array]:
        """Return what ``recall`` begins with where a later prompt has the same beginning."""
        return self.scores

    def add(
        self, keys: SequenceKeys, queries: Float32Array, rows: Int32Array | None = None
    ) -> None:
        """Add the attention of further rows.

        Args:
            keys: all that the sequence holds.
            queries: float32 [layers, n, query_heads, head_dim], rotated: of the rows.
            rows: [n] int32, ascending, which they are; None: the last ones.
        """
        known = self.scores or [np.zeros(0, np.float32)] * keys.heads
        scores = []
        for head, old in enumerate(known):
            received = received_attention(keys, queries, head, rows)
            received[: len(old)] += old
            scores.append(received)
        self.scores = scores

    def keep(self, kept: Sequence[Int32Array]) -> None:
        """Forget the scores of keys that don't stay: of each head, [n] int32 do."""
        self.scores = [scores[own] for scores, own in zip(self.scores, kept, strict=True)]
