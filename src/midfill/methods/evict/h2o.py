"""H2O: keep the keys that have received most attention so far, and the most recent ones.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", NeurIPS 2023, arXiv 2306.14048, section 4 and algorithm 1. A key's score is the attention
that it has received from all rows since it came; the lowest scores are evicted, step by step while
the answer grows.

Differences: a prompt is computed exactly and evicted from once, as in the authors' code, while the
paper's algorithm evicts in the prompt, too. Query heads that share a KV head add up their attention
and evict together. Keys are evicted at the end of each interval; until then rows see them.
"""

import sys
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.methods.budget import budget_tokens, check_budget, check_interval, require
from midfill.methods.evict.accumulated_attention import (
    BLOCK,
    AccumulatedAttention,
    ObservationMemory,
)
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import top_keys
from midfill.models.config import ModelConfig


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
        return BLOCK

    @cached_property
    def memory(self) -> ObservationMemory:
        """Scores after the blocks of earlier prompts."""
        return ObservationMemory()

    def start(self, config: ModelConfig) -> "HeavyHitters":
        """Return the scores of a new sequence."""
        return HeavyHitters(self, AccumulatedAttention(self.memory))

    def recall(self, tokens: Int32Array, tenant: str) -> tuple[int, "HeavyHitters"]:
        """See ``RecallingMethod.recall``."""
        known, attention = AccumulatedAttention.recall(self.memory, tokens, tenant)
        return known, HeavyHitters(self, attention)


@dataclass
class HeavyHitters:
    """The scores of one sequence's keys.

    Attributes:
        method: the hyper-parameters.
        attention: that the keys have received.
        budget: in tokens; 0 until the prompt is known.
    """

    method: H2O
    attention: AccumulatedAttention
    budget: int = 0

    def fork(self) -> "HeavyHitters":
        """See ``SequenceCompressor.fork``."""
        return HeavyHitters(self.method, self.attention.fork(), self.budget)

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """See ``SequenceCompressor.observe``."""
        self.attention.observe(keys, queries)

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        self.attention.add(keys, queries)
        count = int(keys.counts[0])
        self.budget = self.budget or budget_tokens(self.method.budget, count, 0)
        if count <= self.budget:
            return None
        recent = round(self.method.recent * self.budget)
        kept = [self._kept(scores, recent) for scores in self.attention.scores]
        self.attention.keep(kept)
        return Selection.of_heads(kept)

    def _kept(self, scores: Float32Array, recent: int) -> Int32Array:
        """Return the heaviest hitters among older keys, and the recent ones, in order."""
        older = len(scores) - recent
        heavy = np.sort(top_keys(scores[:older], self.budget - recent))
        return np.concatenate((heavy, np.arange(older, len(scores), dtype=np.int32)))
