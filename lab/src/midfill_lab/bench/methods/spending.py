"""The cells of a method, spent otherwise: as many, on keys that something else has chosen.

A method of compression decides two things: how many keys each head keeps, and which. Here the
method is asked how many it would keep of a prompt, and other keys are chosen, in each head as many
or in all heads equally many. What always stays of a prompt, its last rows, stays here as well.

Everything is decided once, at the prompt's end, and all of the answer is kept: answers that are
compared have to be shorter than the method's interval.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.methods.evict.method import (
    CompressionMethod,
    MethodDefaults,
    SequenceCompressor,
    SequenceKeys,
)
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import top_keys
from midfill.models.config import ModelConfig


class KeyChoice(Protocol):
    """Chooses keys."""

    def choose(
        self,
        keys: SequenceKeys,
        queries: Float32Array,
        sizes: Sequence[int],
        generator: np.random.Generator,
    ) -> list[Int32Array]:
        """Return what each head keeps of the tokens before the last rows, in any order.

        Args:
            keys: of the prompt; all heads hold all of it.
            queries: float32 [layers, rows, query_heads, head_dim], of the prompt's last rows.
            sizes: how many tokens each head keeps.
            generator: of random choices; the same for the same prompt.
        """


@dataclass(frozen=True)
class RandomKeys:
    """Tokens at random, other ones in each head, but always the first.

    Attributes:
        sinks: first tokens, which stay: a choice without them loses for that reason alone.
    """

    sinks: int = 4

    def choose(
        self,
        keys: SequenceKeys,
        queries: Float32Array,
        sizes: Sequence[int],
        generator: np.random.Generator,
    ) -> list[Int32Array]:
        """See ``KeyChoice.choose``."""
        before = int(keys.counts[0]) - queries.shape[1]
        chosen = []
        for size in sizes:
            sinks = min(self.sinks, size)
            others = generator.choice(before - sinks, size - sinks, replace=False) + sinks
            chosen.append(np.concatenate((np.arange(sinks), others)).astype(np.int32))
        return chosen


@dataclass(frozen=True)
class EvenKeys:
    """Tokens at equal distances, from the first one on."""

    def choose(
        self,
        keys: SequenceKeys,
        queries: Float32Array,
        sizes: Sequence[int],
        generator: np.random.Generator,
    ) -> list[Int32Array]:
        """See ``KeyChoice.choose``."""
        before = int(keys.counts[0]) - queries.shape[1]
        return [(np.arange(size) * before // max(size, 1)).astype(np.int32) for size in sizes]


Scores = Callable[[SequenceKeys, Float32Array], Sequence[Float32Array]]
"""Returns the score of each token before the last rows in each head: [layers * kv_heads] of [n]."""


@dataclass(frozen=True)
class RankedKeys:
    """Tokens with the highest scores, or with the lowest.

    Attributes:
        scores: of the tokens.
        reverse: whether the lowest stay.
    """

    scores: Scores
    reverse: bool = False

    def choose(
        self,
        keys: SequenceKeys,
        queries: Float32Array,
        sizes: Sequence[int],
        generator: np.random.Generator,
    ) -> list[Int32Array]:
        """See ``KeyChoice.choose``."""
        found = self.scores(keys, queries)
        return [
            top_keys(-scores if self.reverse else scores, size)
            for scores, size in zip(found, sizes, strict=True)
        ]


@dataclass(frozen=True)
class SpentOtherwise(MethodDefaults):
    """Implements ``CompressionMethod`` and ``RecallingMethod``; see the module.

    Attributes:
        method: whose cells are spent. It observes no blocks.
        config: the model as methods see it.
        choice: chooses keys.
        window: the last tokens, which always stay, and whose queries the choice gets.
        equally: whether all heads keep equally many, or as many as under the method.
    """

    method: CompressionMethod
    config: ModelConfig
    choice: KeyChoice
    window: int
    equally: bool

    @property
    def observed_rows(self) -> int:
        """The method's and the choice's."""
        return max(self.method.observed_rows, self.window)

    def start(self, config: ModelConfig) -> "OtherKeys":
        """Return a compressor for a prompt that nobody knows; see ``recall``."""
        return OtherKeys(self, self.method.start(config), np.zeros(0, np.int32))

    def recall(self, tokens: Int32Array, tenant: str) -> tuple[int, SequenceCompressor]:
        """See ``RecallingMethod.recall``: random choices are the prompt's, nothing is recalled."""
        return 0, OtherKeys(self, self.method.start(self.config), tokens)


@dataclass(frozen=True)
class OtherKeys:
    """Implements ``SequenceCompressor`` for one prompt.

    Attributes:
        spending: what is spent, and on what.
        method: at work on the prompt; says how many keys stay.
        tokens: [n] int32, the prompt.
    """

    spending: SpentOtherwise
    method: SequenceCompressor
    tokens: Int32Array

    def fork(self) -> "OtherKeys":
        """See ``SequenceCompressor.fork``."""
        return OtherKeys(self.spending, self.method.fork(), self.tokens)

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing: all observed rows come with ``select``."""

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        spending, count = self.spending, int(keys.counts[0])
        observed = queries[:, max(queries.shape[1] - spending.method.observed_rows, 0) :]
        found = self.method.select(keys, observed)
        if found is None or queries.shape[1] < spending.window:
            return None
        sizes = cells_per_head(found)
        if spending.equally:
            sizes = divide_equally(int(sizes.sum()), len(sizes))
        window = min(spending.window, int(sizes.min()))
        chosen = spending.choice.choose(
            keys,
            queries[:, queries.shape[1] - window :],
            (sizes - window).tolist(),
            prompt_generator(self.tokens),
        )
        recent = np.arange(count - window, count, dtype=np.int32)
        return Selection.of_heads([np.concatenate((own, recent)) for own in chosen])


@dataclass(frozen=True)
class DrawnMethod(MethodDefaults):
    """A method of which something is drawn anew for each prompt, such as which heads it favours.

    Implements ``CompressionMethod`` and ``RecallingMethod``.

    Attributes:
        method: of which something is drawn; what it observes and when it decides stays.
        config: the model as methods see it.
        draw: returns it with something else in the drawn thing's place.
    """

    method: CompressionMethod
    config: ModelConfig
    draw: Callable[[np.random.Generator], CompressionMethod]

    @property
    def observed_rows(self) -> int:
        """The method's."""
        return self.method.observed_rows

    @property
    def interval(self) -> int:
        """The method's."""
        return self.method.interval

    def start(self, config: ModelConfig) -> SequenceCompressor:
        """Return a compressor for a prompt that nobody knows; see ``recall``."""
        return self.recall(np.zeros(0, np.int32), "")[1]

    def recall(self, tokens: Int32Array, tenant: str) -> tuple[int, SequenceCompressor]:
        """See ``RecallingMethod.recall``: what is drawn is the prompt's, nothing is recalled."""
        return 0, self.draw(prompt_generator(tokens)).start(self.config)


def prompt_generator(tokens: Int32Array) -> np.random.Generator:
    """Return the generator of a prompt's random choices: tokens [n] int32 alone decide them."""
    return np.random.default_rng(list(blake2b(tokens.tobytes(), digest_size=16).digest()))


def cells_per_head(selection: Selection) -> Int64Array:
    """Return how many cells each head holds after a selection: [layers * kv_heads].

    A cell that several heads share counts for the first of them.
    """
    sizes, added = np.diff(selection.indptr).astype(np.int64), selection.added
    if added is None:
        return sizes
    _, first = np.unique(added.entries(), return_index=True)
    owners = np.searchsorted(added.indptr, first, side="right") - 1
    return sizes + np.bincount(owners, minlength=len(sizes))


def divide_equally(total: int, parts: int) -> Int64Array:
    """Return ``parts`` numbers [parts] that add up to ``total`` and differ by 1 at most."""
    each, rest = divmod(total, parts)
    return np.full(parts, each, np.int64) + (np.arange(parts) < rest)
