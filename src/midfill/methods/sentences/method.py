"""ChosenSentences: a method whose rows look up sentences, ready for a model.

Prompts are computed exactly, and their KV is the tenant's. What is retained of one, and the KV of
rows that read a part of it, is the sequence's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array
from midfill.methods.sentences.selection import SentenceRule

SentenceEnds = Callable[[Int32Array, int], BoolArray]
"""Tells which of [n] tokens end a sentence, given the position of the first."""
Ranking = Callable[[Float32Array, int], Float32Array]
"""Ranks sentences otherwise than by [heads, sentences] similarities, for the row at a position."""


@dataclass(frozen=True, eq=False)
class EndTokens:
    """Sentences that end with certain tokens; a ``SentenceEnds``.

    Attributes:
        ends: [vocab] bool.
    """

    ends: BoolArray

    def __call__(self, tokens: Int32Array, first: int) -> BoolArray:
        """See ``SentenceEnds``."""
        found: BoolArray = self.ends[tokens]
        return found


@dataclass(frozen=True)
class FixedPages:
    """Pages of equal length in place of sentences; a ``SentenceEnds``.

    Attributes:
        page: tokens per page.
    """

    page: int

    def __call__(self, tokens: Int32Array, first: int) -> BoolArray:
        """See ``SentenceEnds``."""
        numbers = first + np.arange(len(tokens))
        ends: BoolArray = (numbers + 1) % self.page == 0
        return ends


@dataclass(frozen=True)
class ChosenSentences:
    """What rows read, and how sentences are found and ranked.

    Attributes:
        rule: how much is retained and read.
        ends: where sentences end.
        rank: None ranks by similarity.
    """

    rule: SentenceRule
    ends: SentenceEnds
    rank: Ranking | None = None
