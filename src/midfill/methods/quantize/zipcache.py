"""ZipCache: more bits for tokens that the rest of the text attends to, found by a few probe rows.

Source: He et al., "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token
Identification", NeurIPS 2024, arXiv 2405.14256. A token's saliency is the attention that it has
received, divided by how many rows could attend to it: without the division, early tokens win
because more rows see them. It is estimated from few rows, the *probes*: the last 5% of the prompt,
and as many at random from what comes before. With probes P, n tokens and the attention A:

    s[i] = sum over p in P of A[p, i] / #{p in P: p >= i}

The ``salient`` share of the tokens of each KV head with the highest s has ``high`` bits per number,
the others have ``low`` bits. Keys are quantised per channel, over the tokens of a class. Values are
quantised channel-separably token-wise: channel c is divided by sqrt(max |V[:, c]|), over both
classes, and then each token has a scale and a zero.

The prompt is computed exactly, and quantised at its end. Tokens of the answer stay exact in a
window of ``window``; at its end they are quantised as a segment with parameters of their own, by
probes among their own rows: the last 5, and others with the probability ``random``. Nothing is
quantised twice.

Rows that the prefix cache has are not run again, so their queries are unknown. Therefore, as under
H2O, what the random probes of a prompt's beginning have attended to is remembered, in blocks of 64
rows: after a keystroke the last ``recent`` share of the rows runs, and up to 63 before it. A prompt
that was cached without this method runs as a whole. Random probes follow from the tokens before
their block, so that an answer depends on its prompt alone, not on what is cached or remembered, and
prompts with the same beginning share its probes. In the first block they are the same for all
texts.

Differences: the released code divides the probes' sums by n - i, as if all rows were probes, which
favours late tokens (``normalize=positions``). At the end of a window it quantises the whole cache
anew. A class of fewer than four tokens, whose parameters would cost more than they save, stays
exact, and so does one of 16 bits. ``keys`` is ours: all keys then have that many bits, and only
values have more or fewer by saliency.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Self

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.kv.quantized import Float16Array, QuantizedBlock
from midfill.kv.quantized_layout import BITS_PER_CODE
from midfill.methods.budget import require
from midfill.methods.evict.accumulated_attention import (
    BLOCK,
    AccumulatedAttention,
    ObservationMemory,
    block_digests,
)
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import received_attention, top_keys
from midfill.methods.quantize.quantizers import (
    channel_magnitudes,
    quantize_channels,
    quantize_separable,
    refuse_unsuitable,
)
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME = "zipcache"
EXACT = 16
"""Bits of tokens that stay as they are."""
NORMALIZATIONS = ("probes", "positions", "none")

_LAST_OF_WINDOW = 5
_LEAST_TOKENS = 4
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ZipCache(MethodDefaults):
    """The method's hyper-parameters.

    Attributes:
        salient: share of the tokens that have ``high`` bits.
        high, low: bits per number of salient tokens and of the others: 1, 2, 3, 4 or 8; 16 leaves
            them exact.
        keys: bits per number of all quantised keys; 0: as many as their token's values have.
        recent: share of the prompt's rows, its last ones, that are probes; at least one row is.
        random: share of the prompt's rows that are probes at random among those before; in the
            answer, with what probability a row is one.
        window: how many tokens the answer grows by until they are quantised; 0 quantises none.
        normalize: what a token's received attention is divided by: "probes" that see it,
            "positions", all rows that do, or "none", which is accumulated attention.
    """

    salient: float = 0.6
    high: int = 4
    low: int = 2
    keys: int = 0
    recent: float = 0.05
    random: float = 0.05
    window: int = 100
    normalize: str = "probes"

    def __post_init__(self) -> None:
        for name in ("salient", "recent", "random"):
            share = getattr(self, name)
            require(0 <= share <= 1, f"{name} must be a share from 0 to 1, not {share:g}")
        for name in ("high", "low"):
            bits = getattr(self, name)
            require(
                bits in (*BITS_PER_CODE, EXACT), f"{name} must be 1, 2, 3, 4, 8 or 16, not {bits}"
            )
        require(
            self.keys in (0, *BITS_PER_CODE), f"keys must be 0, 1, 2, 3, 4 or 8, not {self.keys}"
        )
        require(
            self.low <= self.high,
            f"high must be at least the {self.low} bits of low, not {self.high}",
        )
        require(self.window >= 0, f"window must be 0 or more tokens, not {self.window}")
        require(
            self.normalize in NORMALIZATIONS,
            f"normalize must be one of {', '.join(NORMALIZATIONS)}, not {self.normalize!r}",
        )

    def for_model(self, model: ServedModel) -> Self:
        """Return the method itself.

        Raises:
            InvalidRequestError: see ``refuse_unsuitable``.
        """
        refuse_unsuitable(NAME, model)
        return self

    @property
    def observed_rows(self) -> int:
        """All of them: probes lie everywhere."""
        return sys.maxsize

    @property
    def block_rows(self) -> int:
        """Of each block of 64 rows, only the probes' queries are used."""
        return BLOCK

    @property
    def follows_eviction(self) -> bool:
        """No: what all tokens have attended to decides."""
        return False

    @property
    def interval(self) -> int:
        """The window."""
        return self.window

    @cached_property
    def memory(self) -> ObservationMemory:
        """What random probes in the blocks of earlier prompts have attended to."""
        return ObservationMemory()

    def start(self, config: ModelConfig) -> "SalientTokens":
        """Return a compressor for a prompt that nobody knows; all rows that it gets are probes."""
        return self.recall(np.zeros(0, np.int32), "")[1]

    def recall(self, tokens: Int32Array, tenant: str) -> "tuple[int, SalientTokens]":
        """See ``RecallingMethod.recall``."""
        probes, settled = self.probes(tokens), self.settled_rows(len(tokens))
        # The digest of a block comes with a token after it.
        beginning = tokens[: settled + 1]
        known, attention = AccumulatedAttention.recall(self.memory, beginning, tenant)
        return known, SalientTokens(self, attention, tokens, probes)

    def settled_rows(self, count: int) -> int:
        """Return how many of a prompt's first rows, whole blocks, have random probes alone."""
        return (count - self._recent_rows(count)) // BLOCK * BLOCK

    def probes(self, tokens: Int32Array) -> Int32Array:
        """Return the rows of a prompt that are probes, ascending: [probes] int32.

        Args:
            tokens: [n] int32, the prompt.
        """
        count = len(tokens)
        before = count - self._recent_rows(count)
        # Nothing but the text decides, so that no tenant is answered otherwise than another.
        seeds = [b"", *block_digests(tokens, BLOCK, "")]
        share = min(self.random / (1 - self.recent), 1.0) if before else 0.0
        drawn = [np.zeros(0, np.int64)]
        for number, start in enumerate(range(0, before, BLOCK)):
            earlier, later = (int(end * share + _ROUNDING) for end in (start, start + BLOCK))
            generator = np.random.default_rng(list(seeds[number]))
            rows = generator.choice(BLOCK, later - earlier, replace=False)
            drawn.append(start + np.sort(rows))
        random = np.concatenate(drawn)
        recent = np.arange(before, count)
        return np.concatenate((random[random < before], recent)).astype(np.int32)

    def saliency(self, received: Float32Array, probes: Int32Array) -> Float32Array:
        """Return how salient tokens are: float32 [n].

        Args:
            received: float32 [n], the attention that they have received from the probes.
            probes: [probes] int32, ascending, numbers of the probes' own tokens among the n.
        """
        token = np.arange(len(received))
        if self.normalize == "none":
            return received
        if self.normalize == "positions":
            seen = len(received) - token
        else:
            seen = len(probes) - np.searchsorted(probes, token)
        return np.divide(received, np.maximum(seen, 1), dtype=np.float32)

    def split(self, saliency: Float32Array) -> tuple[Int32Array, Int32Array]:
        """Return the salient tokens and the others, both ascending: [n] int32.

        Args:
            saliency: float32 [n]; the lowest floor((1 - salient) * n) are the others.
        """
        count = len(saliency)
        others = int((1 - self.salient) * count + _ROUNDING)
        is_salient = np.zeros(count, bool)
        is_salient[top_keys(saliency, count - others)] = True
        found, rest = np.flatnonzero(is_salient), np.flatnonzero(~is_salient)
        return found.astype(np.int32), rest.astype(np.int32)

    def encode(
        self, keys: Float32Array, values: Float32Array, bits: int, magnitudes: Float16Array
    ) -> QuantizedBlock:
        """Return the block of the tokens of one class.

        Args:
            keys, values: float32 [n, head_dim].
            bits: per number of the class.
            magnitudes: float16 [head_dim], of the values' channels.
        """
        return QuantizedBlock.of(
            quantize_channels(keys, self.keys or bits),
            quantize_separable(values, bits, magnitudes),
        )

    def _recent_rows(self, count: int) -> int:
        """Return how many of a prompt's last rows are probes: at least one if there is any."""
        return min(max(round(self.recent * count), 1), count)


@dataclass
class SalientTokens:
    """Implements ``SequenceCompressor``: quantises one sequence's tokens, segment by segment.

    Attributes:
        method: the hyper-parameters.
        attention: that the prompt's keys have received from probes so far.
        tokens: [n] int32, the prompt.
        probes: [probes] int32, ascending, rows of the prompt whose attention counts.
        waiting: queries [layers, n, query_heads, head_dim] of the last probes, which are no part
            of what is remembered.
        segments: how many were decided on.
        exact: keys of each head that earlier decisions left exact.
    """

    method: ZipCache
    attention: AccumulatedAttention
    tokens: Int32Array
    probes: Int32Array
    waiting: list[Float32Array] = field(default_factory=list)
    segments: int = 0
    exact: int = 0

    def fork(self) -> "SalientTokens":
        """See ``SequenceCompressor.fork``."""
        return replace(self, attention=self.attention.fork(), waiting=list(self.waiting))

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """See ``SequenceCompressor.observe``."""
        end = int(keys.counts[0])
        probes, found = self._probes_among(end - queries.shape[1], queries)
        if end <= self.method.settled_rows(len(self.tokens)):
            self.attention.observe(keys, found, probes)
        else:
            self.waiting.append(found)

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        prompt = not self.segments
        received, probes = (self._prompt if prompt else self._window)(keys, queries)
        self.segments += 1
        saliency = [self.method.saliency(each, probes) for each in received]
        return self._quantize(keys, saliency)

    def _probes_among(self, first: int, queries: Float32Array) -> tuple[Int32Array, Float32Array]:
        """Return the probes among some of the prompt's rows, and their queries.

        Args:
            first: of the rows.
            queries: float32 [layers, n, query_heads, head_dim], of all of them.
        """
        rows = range(first, first + queries.shape[1])
        start, end = np.searchsorted(self.probes, (rows.start, rows.stop))
        found = self.probes[start:end]
        return found, queries[:, found - first]

    def _prompt(
        self, keys: SequenceKeys, queries: Float32Array
    ) -> tuple[Sequence[Float32Array], Int32Array]:
        """Return what all tokens of the prompt have received, by head, and from which probes."""
        first = int(keys.counts[0]) - queries.shape[1]
        if not len(self.tokens):
            self.probes = np.arange(first, int(keys.counts[0]), dtype=np.int32)
        _, found = self._probes_among(first, queries)
        waiting = np.concatenate([*self.waiting, found], axis=1)
        self.attention.add(keys, waiting, self.probes[len(self.probes) - waiting.shape[1] :])
        received, self.attention.scores, self.waiting = self.attention.scores, [], []
        return received, self.probes

    def _window(
        self, keys: SequenceKeys, queries: Float32Array
    ) -> tuple[Sequence[Float32Array], Int32Array]:
        """Return what the tokens of a window have received, by head, and from which of them."""
        count = int(keys.counts[0]) - self.exact
        digest = blake2b(self.tokens.tobytes(), digest_size=16).digest()
        generator = np.random.default_rng([*digest, self.segments])
        drawn = generator.random(count) < self.method.random
        drawn[-_LAST_OF_WINDOW:] = True
        probes = np.flatnonzero(drawn).astype(np.int32)
        found = queries[:, probes]
        received = [
            received_attention(keys, found, head, probes + before)[before:]
            for head, before in enumerate(keys.quantized_counts + np.int32(self.exact))
        ]
        return received, probes

    def _quantize(self, keys: SequenceKeys, saliency: Sequence[Float32Array]) -> Selection | None:
        """Return the selection that quantises a segment; None if all of it stays exact.

        Args:
            keys: of the sequence; the segment's are the last exact ones.
            saliency: of each head's tokens of the segment: float32 [n].
        """
        earlier, later = np.split(np.arange(keys.counts[0], dtype=np.int32), [self.exact])
        kept, blocks = [], []
        for head, scores in enumerate(saliency):
            found, values = keys.read(head, later)
            magnitudes, staying, quantized = channel_magnitudes(values), [earlier], []
            classes = self.method.split(scores)
            for tokens, bits in zip(classes, (self.method.high, self.method.low), strict=True):
                if bits == EXACT or len(tokens) < _LEAST_TOKENS:
                    staying.append(later[tokens])
                else:
                    encoded = self.method.encode(found[tokens], values[tokens], bits, magnitudes)
                    quantized.append(encoded)
            kept.append(np.concatenate(staying))
            blocks.append(quantized)
        self.exact = len(kept[0])
        return Selection.of_heads(kept, quantized=blocks) if any(blocks) else None
