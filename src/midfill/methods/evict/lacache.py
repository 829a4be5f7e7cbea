"""LaCache: each layer keeps other old tokens, like the steps of a ladder, and ever fewer of them.

Source: Shi et al., "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large
Language Models", ICML 2025, arXiv 2507.14204, sections 3.2 (ladder) and 3.3 (iterative compaction).
Which tokens stay depends on positions alone, so no query is observed. Keys have the distances that
they have within the cache, see ``Selection.close_gaps``, and an answer may outgrow the model's
context.

Old tokens are compacted block by block: of each block of tokens, every layer keeps a few that lie
side by side, and deeper layers keep later ones. A cursor goes over the cache and begins again at
its start, so the oldest tokens have been thinned most often. The sinks always stay, and as many of
the newest tokens as there are layers, but for as many as one block loses beyond the first.

Differences: a prompt much longer than the cache is thinned evenly, once, by blocks that are
enlarged accordingly, the last one less, so that the cache is filled exactly. The answer's tokens
are compacted after each interval, to the same tokens as one by one.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.methods.budget import budget_tokens, check_budget, check_interval, require
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

LADDERS = ("modulo", "contiguous")


@dataclass(frozen=True)
class LaCache(MethodDefaults):
    """The method's hyper-parameters.

    Attributes:
        budget: tokens kept per layer, or a share of the prompt if below 1.
        span: in how many layers an old token stays, or the share of layers if below 1; the paper's
            half.
        overlap: in how many of them the next token stays as well; the paper's 0.
        sinks: the first tokens, which always stay; the paper's 4.
        ladder: "modulo" repeats the ladder's steps over the layers, as the authors' code does;
            "contiguous" has one ladder from the first layer to the last, as in the paper's figure.
        interval: how many tokens the answer grows by until it is compacted again; the paper's 1.
            0 keeps all of the answer.
    """

    budget: float = 256
    span: float = 0.5
    overlap: int = 0
    sinks: int = 4
    ladder: str = "modulo"
    interval: int = 16

    def __post_init__(self) -> None:
        check_budget(self.budget, self.sinks)
        check_interval(self.interval)
        for name, least in (("sinks", 0), ("overlap", 0)):
            require(getattr(self, name) >= least, f"{name} can't be {getattr(self, name)}")
        require(
            self.span > 0 and (self.span < 1 or self.span == int(self.span)),
            f"span must be a number of layers, or a share below 1, not {self.span:g}",
        )
        require(
            self.ladder in LADDERS,
            f"ladder must be one of {', '.join(LADDERS)}, not {self.ladder!r}",
        )

    def for_model(self, model: ServedModel) -> "LaCache":
        """Return the method itself.

        Raises:
            InvalidRequestError: the model's layers are too few, or the budget is too small for as
                many.
        """
        self.start(model.config)
        return self

    def start(self, config: ModelConfig) -> "LadderCache":
        """Return the cache of a new sequence.

        Raises:
            InvalidRequestError: see ``for_model``.
        """
        ladder = self._ladder(config)
        require(
            not (1 <= self.budget <= ladder.least),
            f"budget must be above {ladder.least} for a model of {config.layers} layers, not "
            f"{self.budget:g}: sinks, as many of the newest tokens as there are layers, and a "
            "step of the ladder always stay",
        )
        return LadderCache(self, ladder)

    def held_tokens(self, prompt: int, config: ModelConfig) -> int | None:
        """See ``RollingMethod``."""
        held = self.cache_size(prompt, self._ladder(config)) + self.interval
        return held if self.interval else None

    def cache_size(self, prompt: int, ladder: "Ladder") -> int:
        """Return how many tokens the cache may hold after a prompt of so many.

        Compaction frees some tokens at a time, so that the cache is full on average.
        """
        return budget_tokens(self.budget, prompt, ladder.least) + ladder.freed // 2

    def _ladder(self, config: ModelConfig) -> "Ladder":
        span = int(self.span) if self.span >= 1 else max(1, round(self.span * config.layers))
        return Ladder(config.layers, span, self.overlap, self.sinks, self.ladder)


@dataclass(frozen=True)
class Ladder:
    """Which tokens of a block stay in which layer.

    Attributes:
        layers: of the model.
        span, overlap, sinks, shape: see ``LaCache``.

    Raises:
        InvalidRequestError: no token would ever go.
    """

    layers: int
    span: int
    overlap: int
    sinks: int
    shape: str = "modulo"

    def __post_init__(self) -> None:
        require(
            self.overlap < self.span,
            f"overlap must be below the span of {self.span} layers, not {self.overlap}",
        )
        require(
            self.freed > 0,
            f"span must be below the model's {self.layers} layers, not {self.span}, or nothing"
            " would ever go",
        )

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return 1 + max(0, -(-(self.layers - self.span) // self._rise))

    @property
    def kept(self) -> int:
        """How many of them each layer keeps."""
        return min(-(-self.span // self._rise), self.block)

    @property
    def freed(self) -> int:
        """How many of them each layer drops."""
        return self.block - self.kept

    def freed_of(self, stretch: int) -> int:
        """Return how many tokens a stretched block drops, see ``compact``."""
        return stretch * (self.block - 1) + 1 - self.kept

    def stretch_of(self, tokens: int) -> int:
        """Return the largest stretch of a block that drops at most ``tokens``; 0: none does."""
        return max(0, (tokens - 1 + self.kept) // (self.block - 1))

    @property
    def least(self) -> int:
        """A cache has to be larger than this."""
        return self.sinks + self.layers + self.kept

    @property
    def _rise(self) -> int:
        """How many layers deeper the layers lie that keep the next token."""
        return self.span - self.overlap

    def first_kept(self, stretch: int = 1) -> Int32Array:
        """Return the first token of a block that each layer keeps: [layers] int32.

        Args:
            stretch: distance of the tokens that a layer keeps.
        """
        layer = np.arange(self.layers, dtype=np.int32)
        last = stretch * self.freed
        if self.shape == "modulo":
            return layer % (last + 1)
        step = layer // self._rise - (self.kept - 1)
        return np.clip(stretch * step, 0, last).astype(np.int32)

    def compact(
        self, tokens: Int32Array, start: int, blocks: int = 1, stretch: int = 1
    ) -> Int32Array:
        """Return what stays of a cache when some of its blocks are compacted.

        Args:
            tokens: [layers, n] int32, the cache of each layer.
            start: where the first block starts.
            blocks: how many follow each other.
            stretch: how far apart the tokens are that a layer keeps of a block; the block is
                larger accordingly.

        Returns:
            [layers, n - blocks * freed tokens] int32.
        """
        block = stretch * (self.block - 1) + 1
        within = stretch * np.arange(self.kept)
        offsets = np.arange(blocks)[:, None] * block + within
        places = start + self.first_kept(stretch)[:, None] + offsets.reshape(-1)
        kept = np.take_along_axis(tokens, places, axis=1)
        return np.concatenate((tokens[:, :start], kept, tokens[:, start + blocks * block :]), 1)


@dataclass
class LadderCache:
    """The state of one sequence's cache.

    Attributes:
        method: the hyper-parameters.
        ladder: what goes.
        size: tokens that the cache may hold; 0 until the prompt is known.
        cursor: where the next block starts.
    """

    method: LaCache
    ladder: Ladder
    size: int = 0
    cursor: int = 0

    def fork(self) -> "LadderCache":
        """See ``SequenceCompressor.fork``."""
        return dataclasses.replace(self)

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing: positions alone decide."""

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        count, kv_heads = int(keys.counts[0]), keys.config.kv_heads
        is_prompt = not self.size
        if is_prompt:
            self.size = self.method.cache_size(count, self.ladder)
            self.cursor = self.method.sinks
        if count <= self.size:
            return None
        tokens = np.tile(np.arange(count, dtype=np.int32), (self.ladder.layers, 1))
        if is_prompt:
            tokens = self._thin(tokens)
        tokens = self._roll(tokens)
        kept = Selection.of_heads([layer for layer in tokens for _ in range(kv_heads)])
        return dataclasses.replace(kept, close_gaps=True)

    def _roll(self, tokens: Int32Array) -> Int32Array:
        """Compact block after block until the cache [layers, n] fits."""
        while tokens.shape[1] > self.size:
            if self.cursor + self.ladder.kept > self.size - self.ladder.layers:
                self.cursor = self.method.sinks
            tokens = self.ladder.compact(tokens, self.cursor)
            self.cursor += self.ladder.kept
        return tokens

    def _thin(self, tokens: Int32Array) -> Int32Array:
        """Thin a prompt evenly, if the cursor would go over it more than once."""
        ladder, start = self.ladder, self.method.sinks
        blocks = (self.size - start - ladder.layers) // ladder.kept
        freed_by_sweep = blocks * ladder.freed
        excess = tokens.shape[1] - self.size - freed_by_sweep
        if excess <= 0:
            return tokens
        tokens = ladder.compact(tokens, start, blocks)
        self.cursor = start
        stretch = -(-excess // freed_by_sweep)
        while stretch:
            blocks, excess = divmod(excess, ladder.freed_of(stretch))
            if blocks:
                tokens = ladder.compact(tokens, self.cursor, blocks, stretch)
                self.cursor += blocks * ladder.kept
            # Of the last block, less goes.
            stretch = ladder.stretch_of(excess)
        return tokens
