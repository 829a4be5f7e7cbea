"""EpisodicMethod: a method with one cache per episode of a conversation, ready for a model."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from midfill.arrays import Float64Array, Int32Array, Int64Array
from midfill.methods.budget import budget_tokens
from midfill.methods.episodes.clustering import Encode
from midfill.methods.episodes.scores import layer_budgets
from midfill.methods.episodes.turns import Parts, TurnReader

Scorer = Literal["episode", "summary", "window", "random"]
"""What scores keys: the instruction and the episode's windows, the instruction alone, each block's
last rows, or chance. All but the first need one episode."""
Route = Literal["nearest", "next"]
"""Which episode's cache answers a question: the nearest, or, as a null, the one after it."""

WINDOW_ROWS = 64
"""Rows of a block that score its keys under ``Scorer`` "window"; SnapKV's."""


@dataclass(frozen=True)
class EpisodeRule:
    """How much is kept, and by what.

    Attributes:
        budget: M, keys that a layer keeps per KV head on average, or a share of the history if
            below 1.
        block: tokens that are computed between two decisions.
        episodes: how many there are at most.
        turns: of a window.
        near: windows at most that represent an episode.
        sinks: first tokens that always stay.
        system: whether the first turn stays whole instead.
        pooled: whether a layer's KV heads compete for its keys.
        grows: whether only whole blocks are compressed, and what follows them stays as it is.
        longest: characters of a turn that isn't divided into sentences.
        seed: of the clusters' first centres.
        memory: of all conversations' caches, in MiB.
    """

    budget: float = 512
    block: int = 512
    episodes: int = 4
    turns: int = 4
    near: int = 4
    sinks: int = 4
    system: bool = False
    pooled: bool = True
    grows: bool = False
    longest: int = 500
    seed: int = 0
    memory: int = 256


@dataclass(frozen=True, eq=False)
class EpisodicMethod:
    """A method with what it knows of a model.

    Attributes:
        rule: how much is kept.
        reader: finds turns.
        instruction: [n] int32, tokens before an episode's windows where keys are scored.
        similarity: [layers] of those that see everything, see ``scores.layer_budgets``.
        alpha: sharpness of layers' budgets.
        scorer, route: see above.
        always: whether histories that fit the budget are compressed, too. They all stay then.
        encode: the sentence encoder that finds topics; None has the model's token embeddings do it.
    """

    rule: EpisodeRule
    reader: TurnReader
    instruction: Int32Array
    similarity: Float64Array
    alpha: float = 0.0
    scorer: Scorer = "episode"
    route: Route = "nearest"
    always: bool = False
    encode: Encode | None = None

    @property
    def identity(self) -> Hashable:
        """What its caches depend on, beside the model and the history."""
        rule, budgets = self.rule, self.similarity.tobytes() if self.alpha else b""
        return (
            rule, self.instruction.tobytes(), budgets, self.alpha, self.scorer, self.always,
            self.encode is None,
        )  # fmt: skip

    def parts(self, tokens: Int32Array, compress_after: int) -> Parts:
        """Return the parts of a prompt, the history as far as it is compressed.

        Args:
            tokens: [n] int32, the prompt.
            compress_after: how many of them are the history; n finds it.
        """
        given = None if compress_after == len(tokens) else compress_after
        parts = self.reader.read(tokens, given)
        if self.rule.grows:
            parts = parts._replace(history=parts.history // self.rule.block * self.rule.block)
        return parts

    def always_kept(self, parts: Parts) -> int:
        """Return how many of a prompt's first tokens always stay."""
        return min(parts.first if self.rule.system else self.rule.sinks, parts.history)

    def mean_budget(self, history: int) -> int:
        """Return M, in tokens."""
        return budget_tokens(self.rule.budget, history, self.rule.sinks)

    def budgets(self, history: int) -> Int64Array:
        """Return M_l: [layers] int64, of those that see everything."""
        return layer_budgets(self.similarity, self.mean_budget(history), self.alpha)

    def compresses(self, parts: Parts) -> bool:
        """Whether a prompt has a history that is compressed."""
        if parts.history <= (parts.first if self.rule.system else 0):
            return False
        return self.always or bool(parts.history > self.budgets(parts.history).min())

    def windows(self, tokens: Int32Array, parts: Parts) -> Int32Array:
        """Return the bounds of a history's windows, see ``TurnReader.windows``."""
        first = parts.first if self.rule.system else 0
        return self.reader.windows(
            tokens[: parts.history], first, self.rule.turns, self.rule.longest
        )

    def longest_patch(self, bounds: Int32Array) -> int:
        """Return how many tokens ``patch`` returns at most, whichever windows represent it."""
        longest = np.sort(np.diff(bounds))[-self.rule.near :].sum()
        return min(len(self.instruction) + int(longest), self.rule.block)

    def patch(
        self, tokens: Int32Array, bounds: Int32Array, representatives: Int64Array
    ) -> Int32Array:
        """Return the tokens whose queries score keys: [n] int32, at most ``rule.block``.

        Args:
            tokens: [n] int32, the history.
            bounds: of its windows.
            representatives: numbers of an episode's windows, nearest first.
        """
        room = self.rule.block - len(self.instruction)
        chosen: list[int] = []
        for number in representatives.tolist() if self.scorer == "episode" else ():
            size = int(bounds[number + 1] - bounds[number])
            if size <= room:
                chosen.append(number)
                room -= size
            elif not chosen:  # a window that is too long by itself shows its beginning
                return np.concatenate(
                    (self.instruction, tokens[bounds[number] : bounds[number] + room])
                )[: self.rule.block]
        windows = [tokens[bounds[number] : bounds[number + 1]] for number in sorted(chosen)]
        return np.concatenate((self.instruction, *windows))[: self.rule.block]
