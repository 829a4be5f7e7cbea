"""MiKV: keep at few bits what eviction would drop, and what is important as it is.

Source: Yang et al., "No Token Left Behind: Reliable KV Cache Compression via Importance-Aware Mixed
Precision Quantization", 2024, arXiv 2402.18096. A share r of a head's keys is important: half of
them are the newest, half have received most attention so far (H2O's score). All others are
quantised to N bits per number, each vector in groups of half its channels:

    alpha = (max - min) / (2^N - 1),  x ~ alpha * round((x - min) / alpha) + min.

Channels in which keys are large and queries small would waste the codes of all others, so keys are
balanced before: channel c is quantised as k_c * b_c, and q_c meets it divided by b_c,

    b_c = sqrt(max_t |q_tc| / max_t |k_tc|) over the prompt's rows, once per request.

Differences:
- The decoded key is divided by b, not the query, which is the same product.
- Query heads that share a KV head add up their attention, and the largest of their queries counts.
- Keys are demoted at the end of each interval; until then rows see all of the answer as it is.
  The share is of all keys so far, so a head keeps more of them as it grows. The paper demotes at
  each token; a block of one key saves nothing here, since it fills a cell.
- With important keys at 8 or 4 bits, a key's tier is decided once, at the end of the interval in
  which it came, since no key is quantised twice.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.kv.quantized import Float16Array, QuantizedBlock
from midfill.methods.budget import check_interval, require
from midfill.methods.evict.accumulated_attention import (
    BLOCK,
    AccumulatedAttention,
    ObservationMemory,
)
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import top_keys
from midfill.methods.quantize.quantizers import quantize_tokens, refuse_unsuitable
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME = "mikv"
LOW_BITS = (2, 3, 4, 8)
EXACT = 16
"""Bits of a key that stays as the KV cache stores it, whatever that is."""

_SMALLEST = np.float32(1e-5)
"""What a channel's largest number counts as where it is smaller, so that none is divided by 0."""


@dataclass(frozen=True)
class MiKV(MethodDefaults):
    """The method's hyper-parameters.

    Attributes:
        ratio: share of the keys that are important; the paper's 0.2 to 0.5.
        low: bits per number of all others: 2, 3, 4 or 8.
        high: of the important ones: 16 leaves them exact, or 8 or 4.
        recent: share of the important keys that are the newest ones; the paper's half.
        balance: whether keys are balanced, 1 or 0.
        interval: how many tokens the answer grows by until keys are demoted again; the paper's 1.
            0 keeps all of the answer exact.
    """

    ratio: float = 0.2
    low: int = 2
    high: int = EXACT
    recent: float = 0.5
    balance: int = 1
    interval: int = 32

    def __post_init__(self) -> None:
        require(0 <= self.ratio <= 1, f"ratio must be a share from 0 to 1, not {self.ratio:g}")
        require(self.low in LOW_BITS, f"low must be 2, 3, 4 or 8 bits, not {self.low:g}")
        require(
            self.high in (EXACT, 8, 4) and self.high >= self.low,
            f"high must be 16, 8 or 4 bits, and not below low={self.low}, not {self.high:g}",
        )
        require(0 <= self.recent <= 1, f"recent must be a share from 0 to 1, not {self.recent:g}")
        require(self.balance in (0, 1), f"balance must be 0 or 1, not {self.balance:g}")
        check_interval(self.interval)

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
        """What was observed after the blocks of earlier prompts."""
        return ObservationMemory()

    def for_model(self, model: ServedModel) -> Self:
        """Return the method itself.

        Raises:
            InvalidRequestError: see ``refuse_unsuitable``.
        """
        refuse_unsuitable(NAME, model)
        return self

    @property
    def follows_eviction(self) -> bool:
        """No: what all tokens have attended to decides."""
        return False

    def start(self, config: ModelConfig) -> "MixedPrecision":
        """Return a compressor for a new sequence."""
        return MixedPrecision(self, ObservedAttention(self.memory))

    def recall(self, tokens: Int32Array, tenant: str) -> "tuple[int, MixedPrecision]":
        """See ``RecallingMethod.recall``."""
        known, attention = ObservedAttention.recall(self.memory, tokens, tenant)
        return known, MixedPrecision(self, attention)

    def important(self, head: int, received: Float32Array, count: int) -> Int32Array:
        """Return which exact keys of a head are important: [count] int32, ascending.

        Args:
            head: ``layer * kv_heads + head``.
            received: [n] float32, attention that each has received.
            count: how many, at most n.
        """
        older = len(received) - math.ceil(self.recent * count)
        heavy = top_keys(received[:older], count - (len(received) - older))
        newest = np.arange(older, len(received), dtype=np.int32)
        return np.concatenate((np.sort(heavy), newest))


@dataclass
class ObservedAttention(AccumulatedAttention):
    """Accumulated attention, and how large queries have been.

    Attributes:
        largest_queries: float32 [layers * kv_heads, head_dim], in each channel the largest absolute
            value of a row's queries; None before the first row.
    """

    largest_queries: Float32Array | None = None

    @classmethod
    def recall(cls, memory: ObservationMemory, tokens: Int32Array, tenant: str) -> tuple[int, Self]:
        """See ``AccumulatedAttention.recall``."""
        known, found = super().recall(memory, tokens, tenant)
        if known:
            *found.scores, found.largest_queries = found.scores
        return known, found

    def remembered(self) -> list[Float32Array]:
        """See ``AccumulatedAttention.remembered``: the scores, then the largest queries."""
        assert self.largest_queries is not None
        return [*self.scores, self.largest_queries]

    def fork(self) -> "ObservedAttention":
        """Return the scores for another answer to the same prompt."""
        return ObservedAttention(
            self.memory, list(self.scores), largest_queries=self.largest_queries
        )

    def add(
        self, keys: SequenceKeys, queries: Float32Array, rows: Int32Array | None = None
    ) -> None:
        """Add further rows; see ``AccumulatedAttention.add``."""
        super().add(keys, queries, rows)
        grouped = (keys.config.layers, -1, keys.config.kv_heads, *_group_shape(keys.config))
        largest = np.abs(queries).reshape(grouped).max(axis=(1, 3))
        largest = largest.reshape(keys.heads, keys.config.head_dim)
        if self.largest_queries is not None:
            largest = np.maximum(largest, self.largest_queries)
        self.largest_queries = largest


def _group_shape(config: ModelConfig) -> tuple[int, int]:
    return config.query_heads // config.kv_heads, config.head_dim


@dataclass
class MixedPrecision:
    """One sequence's keys in two tiers.

    Attributes:
        method: the hyper-parameters.
        attention: that the keys have received, the quantised ones first.
        channel_scales: float16 [layers * kv_heads, head_dim], 1 / b; None until the prompt is
            known, or if keys aren't balanced.
        important: how many important keys are quantised in each head.
    """

    method: MiKV
    attention: ObservedAttention
    channel_scales: Float16Array | None = None
    important: int = 0

    def fork(self) -> "MixedPrecision":
        """See ``SequenceCompressor.fork``."""
        return replace(self, attention=self.attention.fork())

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """See ``SequenceCompressor.observe``."""
        self.attention.observe(keys, queries)

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        method = self.method
        self.attention.add(keys, queries)
        if method.balance and self.channel_scales is None:
            assert self.attention.largest_queries is not None
            self.channel_scales = balance(keys, self.attention.largest_queries)
        # All heads hold equally many keys in each tier.
        exact, quantized = int(keys.counts[0]), int(keys.quantized_counts[0])
        # 0.29 of 100 keys are 28.999999999999996.
        important = int(method.ratio * (exact + quantized) + 1e-6) - self.important
        if exact <= important:
            return None
        high = [
            method.important(head, scores[quantized:], important)
            for head, scores in enumerate(self.attention.scores)
        ]
        low = [_others(exact, numbers) for numbers in high]
        self.attention.keep(_new_order(quantized, low, high))
        blocks = self._blocks(keys, low, method.low)
        if method.high == EXACT:
            return Selection.of_heads(high, quantized=blocks)
        self.important += important
        blocks = [
            [*a, *b] for a, b in zip(blocks, self._blocks(keys, high, method.high), strict=True)
        ]
        return Selection.of_heads([np.zeros(0, np.int32)] * keys.heads, quantized=blocks)

    def _blocks(
        self, keys: SequenceKeys, numbers: Sequence[Int32Array], bits: int
    ) -> list[list[QuantizedBlock]]:
        """Return a block for each head of its keys with some numbers; none for no keys."""
        return [
            [self._block(keys, head, own, bits)] if len(own) else []
            for head, own in enumerate(numbers)
        ]

    def _block(
        self, keys: SequenceKeys, head: int, numbers: Int32Array, bits: int
    ) -> QuantizedBlock:
        scales = None if self.channel_scales is None else self.channel_scales[head]
        groups = channel_groups(keys.config.head_dim)
        found, values = keys.read(head, numbers)
        if scales is not None:
            found = found / scales.astype(np.float32)
        codes = replace(quantize_tokens(found, bits, groups), channel_scale=scales)
        return QuantizedBlock.of(codes, quantize_tokens(values, bits, groups))


def balance(keys: SequenceKeys, largest_queries: Float32Array) -> Float16Array:
    """Return what each channel of keys is divided by before it is quantised, 1 / b.

    Args:
        keys: of the prompt.
        largest_queries: float32 [layers * kv_heads, head_dim], absolute values.

    Returns:
        float16 [layers * kv_heads, head_dim].
    """
    largest = np.stack([np.abs(keys.read_keys(head)).max(axis=0) for head in range(keys.heads)])
    ratio = np.maximum(largest, _SMALLEST) / np.maximum(largest_queries, _SMALLEST)
    scales: Float16Array = np.sqrt(ratio).astype(np.float16)
    return scales


def channel_groups(head_dim: int) -> int:
    """Return in how many groups of channels a vector is quantised.

    Two, which don't mix the halves that the rotary embedding turns against each other; one where
    the halves are no multiples of 16 channels.
    """
    return 2 if head_dim % 32 == 0 else 1


def _others(count: int, numbers: Int32Array) -> Int32Array:
    """Return the numbers below ``count`` that aren't among some: [n] int32, ascending."""
    others = np.ones(count, bool)
    others[numbers] = False
    return np.flatnonzero(others).astype(np.int32)


def _new_order(
    quantized: int, low: Sequence[Int32Array], high: Sequence[Int32Array]
) -> list[Int32Array]:
    """Return where each head's keys were before its low ones were quantised: [n] int32 each.

    Quantised keys come first, the later ones after those before, and ``high`` after all of them,
    be it as the last block or exact.
    """
    before = np.arange(quantized, dtype=np.int32)
    return [
        np.concatenate((before, own + np.int32(quantized), others + np.int32(quantized)))
        for own, others in zip(low, high, strict=True)
    ]
