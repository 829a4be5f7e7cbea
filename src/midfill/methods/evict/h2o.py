"""H2O: keep the keys that have received most attention so far, and the most recent ones.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", NeurIPS 2023, arXiv 2306.14048, section 4 and algorithm 1. A key's score is the attention
that it has received from all rows since it came; the lowest scores are evicted, step by step while
the answer grows.

What the rows of a prompt's beginning have attended to is remembered, so that the next keystroke's
prompt finds its beginning in the cache.

Differences: a prompt is computed exactly and evicted from once, as in the authors' code, while the
paper's algorithm evicts in the prompt, too. Query heads that share a KV head add up their attention
and evict together. Keys are evicted at the end of each interval; until then rows see them.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.methods.budget import budget_tokens, check_budget, check_interval, require
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import received_attention, top_keys
from midfill.models.config import ModelConfig

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


_BLOCK = 64


@dataclass(frozen=True)
class H2O(MethodDefaults):
    """The method's hyper-parameters.

    Attributes:
        budget: tokens kept per layer and head, or a share of the prompt if below 1.
        recent: share of them that are the most recent tokens; the paper's half.
        interval: how many tokens the answer grows by until keys are evicted again; the paper's 1.
            0 keeps all of the answer.
    """

    budget: float = 256
    recent: float = 0.5
    interval: int = 16

    def __post_init__(self) -> None:
        check_budget(self.budget, 0)
        check_interval(self.interval)
        require(0 <= self.recent <= 1, f"recent must be a share from 0 to 1, not {self.recent:g}")

    @property
    def observed_rows(self) -> int:
        """All of them."""
        return sys.maxsize

    @property
    def block_rows(self) -> int:
        """Attention of 64 rows is added up at a time."""
        return _BLOCK

    @cached_property
    def memory(self) -> ObservationMemory:
        """Scores after the blocks of earlier prompts."""
        return ObservationMemory()

    def start(self, config: ModelConfig) -> "HeavyHitters":
        """Return the scores of a new sequence."""
        return HeavyHitters(self)

    def recall(self, tokens: Int32Array, tenant: str) -> tuple[int, "HeavyHitters"]:
        """See ``RecallingMethod.recall``."""
        digests = block_digests(tokens, _BLOCK, tenant)
        blocks, scores = self.memory.longest(digests)
        return blocks * _BLOCK, HeavyHitters(self, scores=scores, digests=digests)


@dataclass
class HeavyHitters:
    """The scores of one sequence's keys.

    Attributes:
        method: the hyper-parameters.
        budget: in tokens; 0 until the prompt is known.
        scores: [n] float32 for each layer and head: the attention that keys have received.
        digests: of the prompt's blocks; none if they are not to be remembered.
    """

    method: H2O
    budget: int = 0
    scores: list[Float32Array] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def fork(self) -> "HeavyHitters":
        """See ``SequenceCompressor.fork``."""
        return HeavyHitters(self.method, self.budget, list(self.scores))

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """See ``SequenceCompressor.observe``."""
        self._add(keys, queries)
        if self.digests:
            block = int(keys.counts[0]) // _BLOCK - 1
            self.method.memory.remember(self.digests[block], self.scores)

    def _add(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Add the attention of further rows."""
        known = self.scores or [np.zeros(0, np.float32)] * keys.heads
        scores = []
        for head, old in enumerate(known):
            received = received_attention(keys, queries, head)
            received[: len(old)] += old
            scores.append(received)
        self.scores = scores

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        self._add(keys, queries)
        count = int(keys.counts[0])
        self.budget = self.budget or budget_tokens(self.method.budget, count, 0)
        if count <= self.budget:
            return None
        recent = round(self.method.recent * self.budget)
        kept = [self._kept(scores, recent) for scores in self.scores]
        self.scores = [scores[own] for scores, own in zip(self.scores, kept, strict=True)]
        return Selection.of_heads(kept)

    def _kept(self, scores: Float32Array, recent: int) -> Int32Array:
        """Return the heaviest hitters among older keys, and the recent ones, in order."""
        older = len(scores) - recent
        heavy = np.sort(top_keys(scores[:older], self.budget - recent))
        return np.concatenate((heavy, np.arange(older, len(scores), dtype=np.int32)))
