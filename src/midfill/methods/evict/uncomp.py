"""UNComp: heads that carry more information keep more keys.

Source: Xiong et al., "UNComp: Can Matrix Entropy Uncover Sparsity? A Compressor Design from an
Uncertainty-Aware Perspective", 2024, arXiv 2410.03090, sections 3.1 (truncated matrix entropy) and
3.3 (compression of the KV cache). The entropy of each head's queries is measured once per model,
see ``uncomp_entropy``; in each layer the heads of the upper half have a larger budget.

Keys are scored by the attention of the last rows, pooled along tokens by the maximum, and scored
again while the answer grows. This is the KV part of the method. Its other part, which drops hidden
rows between groups of layers while a prompt is computed, is ``rows.uncomp_stage``.

Sequences no longer than the budget keep everything.

Differences: the paper's heads have keys of their own; here query heads that share a KV head are one
head, with their mean entropy and mean score. Budgets are divided so that their mean is the budget.
"""

from dataclasses import dataclass, field

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from midfill.methods.budget import (
    budget_tokens,
    check_budget,
    check_interval,
    check_observation,
    require,
)
from midfill.methods.calibration import Tables
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.method import CompressionMethod, MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import head_attention, max_pool, top_keys
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME, VERSION = "uncomp", 1
PAIRS = ("mean", "reference", "extreme")


@dataclass(frozen=True)
class UNComp:
    """The method's hyper-parameters.

    Attributes:
        budget: mean number of tokens kept per layer and head, the window included, or a share of
            the prompt if below 1.
        pair: budgets of heads with high and low entropy. "mean": in the ratio, so that the mean is
            the budget; "reference": 1.5 and 0.75 times the budget, as in the authors' code;
            "extreme": the budget, and that divided by the ratio.
        ratio: of the high budget to the low one; the paper's 2, for "extreme" 4 and more.
        window: the last rows, which are observed and whose tokens are always kept; the paper's 8.
        kernel: width of the pooling along tokens; the paper's 7.
        interval: how many tokens the answer grows by until keys are chosen again; the paper's 1. 0
            keeps all of the answer.
    """

    budget: float = 256
    pair: str = "mean"
    ratio: float = 2.0
    window: int = 8
    kernel: int = 7
    interval: int = 16

    def __post_init__(self) -> None:
        check_observation(self.window, self.kernel)
        check_budget(self.budget, self.window)
        check_interval(self.interval)
        require(self.pair in PAIRS, f"pair must be one of {', '.join(PAIRS)}, not {self.pair!r}")
        require(1 <= self.ratio < np.inf, f"ratio must be 1 or more, not {self.ratio:g}")

    def for_model(self, model: ServedModel) -> CompressionMethod:
        """See ``ModelSpecific.for_model``."""
        full = FullLayers.required_by(NAME, model.config)
        tables, config = load_tables(NAME, VERSION, model), model.config
        require(
            tables["marks"].shape == (config.layers, config.kv_heads),
            f"{NAME}: the tables are of a model with other layers or heads",
        )
        seen = {name: table[full.layers] for name, table in tables.items()}
        return GroupedHeads(self, tuple(high_heads(seen).tolist()))

    def budgets(self, tokens: int, high: BoolArray) -> Int64Array:
        """Return each head's budget.

        Args:
            tokens: the budget.
            high: bool [heads], which heads have high entropy.

        Returns:
            int64 [heads], each above the window. With the pair "mean" their mean is ``tokens``, if
            the lower budget is above the window.
        """
        count = len(high)
        if self.pair == "mean":
            shares = np.where(high, self.ratio, 1.0)
            exact = tokens * count * shares / shares.sum()
            found = np.floor(exact).astype(np.int64)
            rest = tokens * count - int(found.sum())
            found[np.argsort(found - exact, kind="stable")[:rest]] += 1
        elif self.pair == "reference":
            found = np.where(high, int(1.5 * tokens), int(0.75 * tokens))
        else:
            found = np.where(high, tokens, int(tokens / self.ratio))
        budgets: Int64Array = np.maximum(found, self.window + 1)
        return budgets


def high_heads(tables: Tables) -> BoolArray:
    """Return which KV heads belong to the group of high entropy: bool [layers * kv_heads].

    In each layer, these are the half (rounded up) that was in the upper half most often; of equal
    ones those with the higher mean entropy.

    Args:
        tables: "marks" and "entropy", [layers, kv_heads].
    """
    marks, entropy = tables["marks"], tables["entropy"]
    high = np.zeros(marks.shape, bool)
    for layer in range(len(marks)):
        ranked = np.lexsort((-entropy[layer], -marks[layer]))
        high[layer, ranked[: (len(ranked) + 1) // 2]] = True
    return high.reshape(-1)


@dataclass(frozen=True)
class GroupedHeads(MethodDefaults):
    """The method with what it knows of a model.

    Attributes:
        method: the hyper-parameters.
        high: of each layer's KV heads, whether it belongs to the group of high entropy.
    """

    method: UNComp
    high: tuple[bool, ...]

    @property
    def observed_rows(self) -> int:
        """The window's."""
        return self.method.window

    @property
    def interval(self) -> int:
        """The method's."""
        return self.method.interval

    def start(self, config: ModelConfig) -> "WindowScores":
        """Return the scores of a new sequence."""
        return WindowScores(self.method, np.array(self.high))


@dataclass
class WindowScores:
    """What one sequence's last rows attend to.

    Attributes:
        method: the hyper-parameters.
        high: which heads have high entropy.
        tokens: the budget; 0 until the prompt is known.
        budgets: of each head.
        rows: float32 [query heads, window, n] of each head: attention of the last rows to the keys
            that it holds, as it was when they ran.
    """

    method: UNComp
    high: BoolArray
    tokens: int = 0
    budgets: list[int] = field(default_factory=list)
    rows: list[Float32Array] = field(default_factory=list)

    def fork(self) -> "WindowScores":
        """See ``SequenceCompressor.fork``."""
        return WindowScores(self.method, self.high, self.tokens, self.budgets, list(self.rows))

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing: all observed rows come with ``select``."""

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        method = self.method
        if not self.tokens:
            self.tokens = budget_tokens(method.budget, int(keys.counts[0]), method.window)
            self.budgets = method.budgets(self.tokens, self.high).tolist()
        self._note(keys, queries)
        if keys.counts.max() <= self.tokens:
            return None
        kept = [
            self._kept(rows, budget) for rows, budget in zip(self.rows, self.budgets, strict=True)
        ]
        self.rows = [rows[:, :, own] for rows, own in zip(self.rows, kept, strict=True)]
        return Selection.of_heads(kept)

    def _note(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Add the attention of new rows; older rows see none of the new keys."""
        window, noted = self.method.window, []
        for head in range(keys.heads):
            new = head_attention(keys, queries, head)
            if self.rows:
                old = self.rows[head]
                missing = new.shape[-1] - old.shape[-1]
                new = np.concatenate((np.pad(old, ((0, 0), (0, 0), (0, missing))), new), axis=1)
            noted.append(new[:, -window:])
        self.rows = noted

    def _kept(self, rows: Float32Array, budget: int) -> Int32Array:
        """Return the keys that a head keeps, in order."""
        count, window = rows.shape[-1], self.method.window
        if count <= budget:
            return np.arange(count, dtype=np.int32)
        scores = window_scores(rows[:, :, :-window], self.method.kernel)
        recent = np.arange(count - window, count, dtype=np.int32)
        return np.concatenate((np.sort(top_keys(scores, budget - window)), recent))


def window_scores(rows: Float32Array, kernel: int) -> Float32Array:
    """Return the scores of a head's keys: float32 [n].

    Args:
        rows: float32 [query heads, window, n], the last rows' attention to them.
        kernel: width of the pooling.
    """
    scores: Float32Array = max_pool(rows.sum(axis=1), kernel).mean(axis=0)
    return scores
