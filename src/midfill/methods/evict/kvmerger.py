"""KVMerger: merge runs of tokens with similar keys, instead of evicting tokens.

Source: Wang et al., "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on
Long-Context Tasks", 2024, arXiv 2407.08454. Neighbouring keys of a head are alike. Each run of
neighbours whose cosine similarity reaches epsilon becomes one entry, around its token that has
received most attention (the pivot); what is recent or has received much attention stays as it is.

Keys are merged as they are cached, after the rotary embedding: members of a run lie side by side,
so their phases hardly differ. An entry counts for as many tokens as it stands for.

Differences:
- The paper weights values by the number of tokens and leaves the softmax's denominator alone. By
  default an entry's score grows by the log of that number instead, so that its mass is right both
  above and below the fraction line: identical tokens then merge without any loss.
- The paper's sigma is the mean of the Gaussians that need it, which is circular; its ablation finds
  a fixed 5 best for Llama 2. By default each set has the root mean square of its own distances.
- Epsilon is by default the one at which the budget is met, for all layers together, exactly: the
  limit of a binary search, found by order statistics. The paper has 0.75.
- A token's attention is by default that of the prompt's last rows, which costs little and knows
  what the prompt ends with. The paper adds up that of all rows (window=0).
- Query heads that share a KV head add up their attention.
- The prompt is merged once; the answer's own tokens stay as they are.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from midfill.kv.ragged import KeyTerms
from midfill.methods.budget import budget_tokens, check_budget, require
from midfill.methods.evict.accumulated_attention import (
    BLOCK,
    AccumulatedAttention,
    ObservationMemory,
)
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.methods.evict.window_attention import top_keys
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME = "kvmerger"
MASSES = ("logbias", "value", "none")


@dataclass(frozen=True)
class KVMerger(MethodDefaults):
    """The method's hyper-parameters.

    Attributes:
        budget: entries kept per layer and head, on average, or a share of the prompt if below 1.
        epsilon: cosine similarity from which on neighbours merge; 0 is the one at which the budget
            is met. Any other leaves the number of entries to the text, and the budget says only how
            many tokens are protected. Above 1 nothing merges.
        recent, heavy: shares of a merged head's entries that are the most recent tokens, and those
            that have received most attention, which never merge; the paper's 17% and 12% of the
            prompt at a budget of 50%.
        first_layers, last_layers: how many layers stay whole at the model's beginning and end,
            where attention is nearly uniform, unless that leaves the others less than half of the
            budget; the paper's 2 and 1.
        window: the prompt's last rows, whose attention counts; 0 is all rows, as in the paper.
        sigma: width of the Gaussians; 0 is, in each set, the root mean square of the distances from
            its pivot. The paper's ablation prefers 5, for Llama 2's keys.
        mass: how an entry counts for n tokens: "logbias" adds log n to its score, "value"
            multiplies its value by n, as in the paper, "none" does neither.
    """

    budget: float = 0.5
    epsilon: float = 0.0
    recent: float = 0.34
    heavy: float = 0.24
    first_layers: int = 2
    last_layers: int = 1
    window: int = 32
    sigma: float = 0.0
    mass: str = "logbias"

    def __post_init__(self) -> None:
        check_budget(self.budget, 0)
        require(
            -1 <= self.epsilon < math.inf,
            f"epsilon must be a cosine similarity, -1 or more, not {self.epsilon:g}",
        )
        require(
            self.recent >= 0 and self.heavy >= 0 and self.recent + 2 * self.heavy <= 1,
            "recent and twice heavy must be shares that add up to at most 1, not"
            f" {self.recent:g} and 2 * {self.heavy:g}: between two protected tokens may lie a run",
        )
        for name in ("first_layers", "last_layers", "window"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0")
        require(0 <= self.sigma < math.inf, f"sigma must be 0 or more, not {self.sigma:g}")
        require(self.mass in MASSES, f"mass must be one of {', '.join(MASSES)}, not {self.mass!r}")

    @property
    def observed_rows(self) -> int:
        """The window's, or all of them."""
        return self.window or sys.maxsize

    @property
    def block_rows(self) -> int:
        """Attention of 64 rows is added up at a time, if it is of all of them."""
        return 0 if self.window else BLOCK

    @cached_property
    def memory(self) -> ObservationMemory:
        """Attention after the blocks of earlier prompts."""
        return ObservationMemory()

    def for_model(self, model: ServedModel) -> "KVMerger":
        """Return the method itself.

        Raises:
            InvalidRequestError: no layer sees the whole text.
        """
        FullLayers.required_by(NAME, model.config)
        return self

    def start(self, config: ModelConfig) -> "TokenMerger":
        """Return a compressor for a new sequence."""
        return TokenMerger(self, AccumulatedAttention(self.memory))

    def recall(self, tokens: Int32Array, tenant: str) -> tuple[int, "TokenMerger"]:
        """See ``RecallingMethod.recall``."""
        if self.window:
            return 0, TokenMerger(self, AccumulatedAttention(self.memory))
        known, attention = AccumulatedAttention.recall(self.memory, tokens, tenant)
        return known, TokenMerger(self, attention)

    def merged_layers(self, layers: int, tokens: int, budget: int) -> range:
        """Return which layers are merged, the others staying whole.

        Args:
            layers: of the model.
            tokens: of the prompt, more than the budget.
            budget: entries per layer and head.
        """
        merged = range(self.first_layers, layers - self.last_layers)
        if not merged:
            return range(layers)
        left = budget * layers - tokens * (layers - len(merged))
        return merged if 2 * (left // len(merged)) >= budget else range(layers)

    def similarity(self, keys: Float32Array) -> Float32Array:
        """Return the cosine similarity of each key [n, head_dim] to the next: [n - 1]."""
        norms = np.maximum(np.linalg.norm(keys, axis=1), np.finfo(np.float32).tiny)
        products = np.einsum("nd,nd->n", keys[:-1], keys[1:])
        cosines: Float32Array = products / norms[:-1] / norms[1:]
        return cosines

    def terms(self, sizes: Int64Array) -> KeyTerms | None:
        """Return how much entries count that stand for so many tokens: [n]."""
        if self.mass == "none":
            return None
        terms = KeyTerms.neutral(len(sizes))
        if self.mass == "value":
            terms.value_factor[:] = sizes
        else:
            terms.score_bias[:] = np.log(sizes)
        return terms


@dataclass
class TokenMerger:
    """Implements ``SequenceCompressor``: merges one prompt's tokens.

    Attributes:
        method: the hyper-parameters.
        attention: that the keys have received.
    """

    method: KVMerger
    attention: AccumulatedAttention

    def fork(self) -> "TokenMerger":
        """See ``SequenceCompressor.fork``."""
        return TokenMerger(self.method, self.attention.fork())

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """See ``SequenceCompressor.observe``."""
        self.attention.observe(keys, queries)

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        method, config, tokens = self.method, keys.config, int(keys.counts[0])
        budget = budget_tokens(method.budget, tokens, 0)
        if tokens <= budget:
            return None
        self.attention.add(keys, queries)
        layers = method.merged_layers(config.layers, tokens, budget)
        entries = budget * config.layers - tokens * (config.layers - len(layers))
        heads = range(layers.start * config.kv_heads, layers.stop * config.kv_heads)
        found = self._neighbours(keys, heads, entries // len(layers))
        epsilon = method.epsilon or meet_budget(found, entries * config.kv_heads)
        merged = [
            self._merge(keys, head, run_starts(neighbours, epsilon))
            for head, neighbours in zip(heads, found, strict=True)
        ]
        self.attention.scores = []  # it decides once
        return self._selection(keys, heads, merged)

    def _neighbours(self, keys: SequenceKeys, heads: range, entries: int) -> "list[Neighbours]":
        """Return what may merge in some heads, which keep ``entries`` each on average."""
        recent = min(round(self.method.recent * entries), entries - 1)
        heavy = min(round(self.method.heavy * entries), (entries - 1 - recent) // 2)
        return [
            Neighbours(
                self.method.similarity(keys.read_keys(head)),
                protected_tokens(self.attention.scores[head], recent, heavy),
            )
            for head in heads
        ]

    def _merge(self, keys: SequenceKeys, head: int, starts: Int64Array) -> "MergedHead":
        """Return a head whose tokens are merged in sets that start at ``starts``."""
        tokens = int(keys.counts[head])
        sizes = np.diff(starts, append=tokens)
        members = np.flatnonzero(np.repeat(sizes > 1, sizes)).astype(np.int32)
        found, values = keys.read(head, members)
        attention, merged = self.attention.scores[head][members], sizes[sizes > 1]
        weights = gaussian_weights(found, attention, merged, self.method.sigma)
        return MergedHead(
            kept=starts[sizes == 1].astype(np.int32),
            keys=sum_sets(weights[:, None] * found, merged),
            values=sum_sets(weights[:, None] * values, merged),
            sizes=merged,
        )

    def _selection(
        self, keys: SequenceKeys, heads: range, merged: "Sequence[MergedHead]"
    ) -> Selection | None:
        """Return what stays of all heads, of which ``heads`` are merged; None if all does."""
        kept = [np.arange(count, dtype=np.int32) for count in keys.counts]
        counts = np.zeros(keys.heads, np.int64)
        for head, one in zip(heads, merged, strict=True):
            kept[head], counts[head] = one.kept, len(one.sizes)
        if not counts.any():
            return None
        added = AddedKeys(
            keys=np.concatenate([one.keys for one in merged]),
            values=np.concatenate([one.values for one in merged]),
            indptr=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            terms=self.method.terms(np.concatenate([one.sizes for one in merged])),
        )
        return Selection.of_heads(kept, added)


@dataclass(frozen=True)
class Neighbours:
    """What may merge in one head.

    Attributes:
        similarity: [n - 1] float32, of each token to the next; what is no number merges nothing.
        protected: [n] bool, tokens that stay by themselves.
    """

    similarity: Float32Array
    protected: BoolArray

    @property
    def free(self) -> BoolArray:
        """Whether each token may merge with the next: [n - 1]."""
        free: BoolArray = ~(self.protected[:-1] | self.protected[1:]) & ~np.isnan(self.similarity)
        return free


@dataclass(frozen=True)
class MergedHead:
    """One head after merging.

    Attributes:
        kept: [n] int32, tokens that stay as they are.
        keys, values: float32 [m, head_dim], of the merged sets.
        sizes: [m] int64, tokens of each, 2 or more.
    """

    kept: Int32Array
    keys: Float32Array
    values: Float32Array
    sizes: Int64Array


def protected_tokens(attention: Float32Array, recent: int, heavy: int) -> BoolArray:
    """Return which tokens never merge: [n] bool.

    Args:
        attention: [n] float32, what each has received.
        recent: how many of the last ones.
        heavy: how many of the others, those with the most attention.
    """
    protected = np.zeros(len(attention), bool)
    older = len(attention) - recent
    protected[older:] = True
    protected[top_keys(attention[:older], heavy)] = True
    return protected


def meet_budget(heads: Sequence[Neighbours], entries: int) -> float:
    """Return the largest epsilon at which heads keep at most ``entries`` together.

    A head has one set, and one more wherever neighbours don't merge. That grows with epsilon by one
    at each similarity, so that the order of the similarities is all that there is to search.
    """
    tokens = sum(len(head.protected) for head in heads)
    similarities = np.concatenate([head.similarity[head.free] for head in heads])
    apart = max(entries - (tokens - len(similarities)), 0)
    if apart >= len(similarities):
        return math.inf
    return float(np.partition(similarities, apart)[apart])


def run_starts(neighbours: Neighbours, epsilon: float) -> Int64Array:
    """Return where sets of one head start: [sets] int64, ascending from 0.

    A set is a run of tokens each of which merges with the next.
    """
    merges = neighbours.free & (neighbours.similarity >= epsilon)
    return np.concatenate(([0], np.flatnonzero(~merges) + 1))


def sum_sets(members: Float32Array, sizes: Int64Array) -> Float32Array:
    """Return the sums over consecutive sets of [n, ...] members: [sets, ...].

    Args:
        members: of all sets, one after the other.
        sizes: [sets] int64, how many each has, at least 1.
    """
    sums: Float32Array = np.add.reduceat(members, _first(sizes), axis=0)
    return sums


def gaussian_weights(
    keys: Float32Array, attention: Float32Array, sizes: Int64Array, sigma: float
) -> Float32Array:
    """Return the weights of the members of consecutive sets, which add up to 1 in each: [n].

    exp(-|k_p - k_i|^2 / (2 sigma^2)) for the distance of a key k_i from its set's pivot k_p, the
    token that has received most attention.

    Args:
        keys: float32 [n, head_dim], of the members of all sets, one set after the other.
        attention: [n] float32, what each has received.
        sizes: [sets] int64, how many members each set has.
        sigma: of the Gaussians; 0 is the root mean square of the distances in each set.
    """
    number = np.repeat(np.arange(len(sizes)), sizes)
    pivots = np.lexsort((-attention, number))[_first(sizes)]
    distance = np.square(keys - keys[pivots[number]]).sum(axis=1)
    if sigma:
        variance = np.full(len(sizes), sigma**2, np.float32)
    else:
        # Equal keys have no distance, whatever it is divided by.
        variance = np.maximum(sum_sets(distance, sizes) / sizes, np.finfo(np.float32).tiny)
    powers = np.exp(-distance / (2 * variance[number])).astype(np.float32)
    weights: Float32Array = powers / sum_sets(powers, sizes)[number]
    return weights


def _first(sizes: Int64Array) -> Int64Array:
    """Return the places of the first members of consecutive sets: [sets]."""
    return np.cumsum(sizes) - sizes
