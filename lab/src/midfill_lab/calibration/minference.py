"""MInference's search: which shape each head's attention has, at equal cost.

A model reads long prompts that end with a question about something in them: keys and values, as in
the paper, and source code with a hidden sentence. For the last chunk's rows, attention is computed
in full, and for each pattern how much of it lies on the keys that the pattern lists. Patterns are
enlarged or shrunk until each computes the same share of the products of queries and keys; the one
that holds most attention wins, as in the released search.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from midfill.arrays import BoolArray, Float32Array, Float64Array, Int32Array
from midfill.config import ModelOptions
from midfill.errors import InvalidRequestError
from midfill.methods.calibration import Tables
from midfill.methods.model_probe import ModelProbe
from midfill.methods.needles import needle_text
from midfill.methods.sparse_prefill.method import PROBED_ROWS
from midfill.methods.sparse_prefill.minference import (
    CANDIDATES,
    VERSION,
    Pattern,
    pattern_mask,
)
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.runners.forward.attention import QUERY_BLOCK
from midfill.runners.loading import load_runner
from midfill.runners.torch.part_attention import TorchProbe
from midfill.system.progress import Progress

SIZES = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.8)
"""Factors of the candidates' sizes that are tried, ascending."""
_CHUNK = 1024
_LENGTHS = 3  # of the series of needle texts; every third is the longest
_WORDS = 6


@dataclass(frozen=True)
class PatternSearch:
    """The settings of a search; implements ``Calibrator``.

    Attributes:
        tokens: of each text; as many as the context has room for if that is less.
        texts: how many.
        budget: share of the products of queries and keys that a pattern may compute.
        seed: of the texts.
    """

    tokens: int = 4096
    texts: int = 4
    budget: float = 0.2
    seed: int = 0

    version: ClassVar[int] = VERSION

    def __post_init__(self) -> None:
        if self.tokens < 2 * PROBED_ROWS or self.texts < 1:
            raise InvalidRequestError(
                f"tokens must be at least {2 * PROBED_ROWS}, texts at least 1", param="method"
            )
        if not 0 < self.budget <= 1:
            raise InvalidRequestError("budget must be above 0 and at most 1", param="method")

    def open(self, checkpoint: Checkpoint, progress: Progress) -> "PatternSearchWork":
        """See ``Calibrator.open``."""
        tokens = min(self.tokens, checkpoint.config.context - 1)
        runner = load_runner(checkpoint, ModelOptions(context=tokens + 1), progress)
        return PatternSearchWork(self, ModelProbe(runner), checkpoint.tokenizer, tokens)


@dataclass(frozen=True)
class PatternSearchWork:
    """A search with its model; implements ``CalibrationWork``. A step is a text.

    Attributes:
        search: the settings.
        probe: runs the model.
        tokenizer: of the model.
        tokens: of each text.
    """

    search: PatternSearch
    probe: ModelProbe
    tokenizer: Tokenizer
    tokens: int

    @property
    def steps(self) -> int:
        """One per text."""
        return self.search.texts

    def start(self) -> Tables:
        """Return zeros: mass and cost of each head under each candidate at each size."""
        config = self.probe.runner.config
        shape = (config.layers, config.query_heads, len(CANDIDATES), len(SIZES))
        return {"mass": np.zeros(shape), "cost": np.zeros(shape)}

    def step(self, number: int, tables: Tables) -> Tables:
        """Return the means of what is known and one more text; after the last, what was chosen."""
        found = self._measure(self._text(number))
        means = {name: tables[name] + (found[name] - tables[name]) / (number + 1) for name in found}
        return choose(means, self.search.budget) if number + 1 == self.steps else means

    def close(self) -> None:
        """End the runner's threads."""
        self.probe.close()

    def _text(self, number: int) -> Int32Array:
        if number % 2:
            found = needle_text(
                self.tokenizer, self.tokens, _WORDS, number * _LENGTHS, self.search.seed
            )
            return found.token_ids[-self.tokens :]
        return pairs_text(self.tokenizer, self.tokens, [self.search.seed, number])

    def _measure(self, text: Int32Array) -> Tables:
        """Return mass and cost of all patterns over a text's last chunk."""
        config = self.probe.runner.config
        first = (len(text) - PROBED_ROWS) // _CHUNK * _CHUNK
        queries = self.probe.queries(text, 0, first)
        keys = self.probe.keys(len(text))
        found = self.start()
        for layer in range(config.layers):
            if config.window_of(layer) is not None:
                continue
            heads = range(layer * config.kv_heads, (layer + 1) * config.kv_heads)
            own = np.stack([keys.read(head)[0] for head in heads], axis=1)
            probe = KnownLayer.of(
                TorchProbe(
                    layer, torch.from_numpy(queries[layer]), torch.from_numpy(own),
                    config.score_scale,
                )
            )  # fmt: skip
            for number, candidate in enumerate(CANDIDATES):
                for place, size in enumerate(SIZES):
                    mask = pattern_mask(probe, (_sized(candidate, size),) * config.query_heads)
                    mass, cost = probe.evaluate(mask)
                    found["mass"][layer, :, number, place] = mass
                    found["cost"][layer, :, number, place] = cost
        return found


@dataclass(eq=False)
class KnownLayer:
    """A layer whose attention is known; implements ``PatternProbe``.

    Attributes:
        first, rows, query_heads, kv_heads: see ``PatternProbe``.
        crosses: what ``masses`` returns.
        queries, keys: means of blocks.
        attention: float32 [query_heads, blocks, keys], softmax weights summed over each block.
    """

    first: int
    rows: int
    query_heads: int
    kv_heads: int
    crosses: tuple[Float32Array, Float32Array]
    queries: Float32Array
    keys: Float32Array
    attention: Float32Array

    @classmethod
    def of(cls, probe: TorchProbe) -> "KnownLayer":
        """Compute all that will be asked for."""
        weights = probe.scores(probe.rows).softmax(dim=-1).numpy()
        starts = np.arange(0, probe.rows, QUERY_BLOCK)
        return cls(
            probe.first, probe.rows, probe.query_heads, probe.kv_heads,
            probe.masses(min(PROBED_ROWS, probe.rows)), probe.mean_queries(QUERY_BLOCK),
            probe.mean_keys(QUERY_BLOCK), np.add.reduceat(weights, starts, axis=1),
        )  # fmt: skip

    def masses(self, rows: int) -> tuple[Float32Array, Float32Array]:
        """See ``PatternProbe.masses``."""
        return self.crosses

    def mean_queries(self, block: int) -> Float32Array:
        """See ``PatternProbe.mean_queries``."""
        return self.queries

    def mean_keys(self, block: int) -> Float32Array:
        """See ``PatternProbe.mean_keys``."""
        return self.keys

    def evaluate(self, mask: BoolArray) -> tuple[Float64Array, Float64Array]:
        """Return a mask's share of the attention and of the products, per head: [query_heads].

        Args:
            mask: [blocks, query_heads, keys].
        """
        held = np.where(mask, self.attention.transpose(1, 0, 2), 0).sum(axis=(0, 2), dtype=float)
        counts = np.minimum(QUERY_BLOCK, self.rows - np.arange(len(mask)) * QUERY_BLOCK)
        products = (mask.sum(axis=2) * counts[:, None]).sum(axis=0)
        causal = self.rows * self.first + self.rows * (self.rows + 1) / 2
        return held / self.rows, products / causal


def choose(tables: Tables, budget: float) -> Tables:
    """Return each head's best pattern within a budget.

    Args:
        tables: "mass" and "cost", [layers, query_heads, candidates, sizes].
        budget: share of the products that a pattern may compute. One that takes more at any size is
            taken at the smallest.

    Returns:
        "pattern", "size", and its "mass" and "cost": [layers, query_heads] each.
    """
    place = np.maximum(np.count_nonzero(tables["cost"] <= budget, axis=-1) - 1, 0)[..., None]
    mass, cost = (np.take_along_axis(tables[name], place, -1)[..., 0] for name in ("mass", "cost"))
    best = mass.argmax(axis=-1)[..., None]
    return {
        "pattern": best[..., 0].astype(np.float64),
        "size": np.take_along_axis(np.array(SIZES)[place[..., 0]], best, -1)[..., 0],
        "mass": np.take_along_axis(mass, best, -1)[..., 0],
        "cost": np.take_along_axis(cost, best, -1)[..., 0],
    }


def pairs_text(tokenizer: Tokenizer, tokens: int, seed: list[int]) -> Int32Array:
    """Return a text of random keys and values that ends with a question for one of them.

    Args:
        tokenizer: of the model.
        tokens: of the text.
        seed: of its random choices.
    """
    rng = np.random.default_rng(seed)
    # A line has more than four tokens whatever the vocabulary.
    numbers = rng.integers(16**7, 16**8, size=(tokens // 4, 2)).tolist()
    lines = 0
    ids: list[int] = []
    while len(ids) < tokens:
        key, value = numbers[lines]
        ids += tokenizer.encode(f'"{key:08x}": "{value:08x}",\n')
        lines += 1
    asked, _ = numbers[int(rng.integers(lines // 4, lines))]
    ids += tokenizer.encode(f'# The value of "{asked:08x}" is "')
    return np.array(ids[-tokens:], np.int32)


def _sized(pattern: Pattern, size: float) -> Pattern:
    return Pattern(pattern.shape, pattern.columns * size, pattern.diagonals * size)
