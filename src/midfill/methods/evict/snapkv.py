"""SnapKV: keep what the prompt's last rows attend to, head by head.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024,
arXiv 2404.14469, section 4.2. Query heads that share a KV head vote together (mean). A layer's
votes need nothing of other layers, so each can be trimmed as soon as it has run (``cascade``).
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.methods.budget import (
    budget_tokens,
    check_budget,
    check_cascade,
    check_observation,
)
from midfill.methods.evict.method import OneShot, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import (
    average_pool,
    group_mean,
    top_keys,
    window_attention,
)
from midfill.models.config import ModelConfig


@dataclass(frozen=True)
class SnapKV(OneShot):
    """The method's hyper-parameters.

    Attributes:
        budget: tokens kept per layer and head, the window included, or a share of the prompt if
            below 1.
        window: the prompt's last rows, which vote and are always kept; the paper's 32.
        kernel: width of the pooling that keeps a token's neighbours with it; the code's 5.
        cascade: 1 trims while the prompt is prefilled, so that it never holds all slots, and leaves
            nothing of it in the prefix cache; 0 does it once the prompt is computed.
    """

    budget: float = 256
    window: int = 32
    kernel: int = 5
    cascade: int = 0

    def __post_init__(self) -> None:
        check_observation(self.window, self.kernel)
        check_budget(self.budget, self.window)
        check_cascade(self.cascade)

    @property
    def observed_rows(self) -> int:
        """The window's."""
        return self.window

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        budget = self.kept_tokens(int(keys.counts[0]))
        if budget is None or queries.shape[1] < self.window:
            return None
        layers = range(keys.config.layers)
        return Selection.of_heads(
            [kept for layer in layers for kept in self.best(keys, queries, layer, budget)]
        )

    @property
    def only_drops(self) -> bool:
        """See ``DroppingMethod.only_drops``."""
        return True

    @property
    def cascades(self) -> bool:
        """See ``CascadingMethod.cascades``."""
        return self.cascade > 0

    def kept_tokens(self, prompt: int) -> int | None:
        """See ``CascadingMethod.kept_tokens``."""
        budget = budget_tokens(self.budget, prompt, self.window)
        return None if prompt <= budget else budget

    def start_cascade(self, config: ModelConfig, prompt: int) -> "SnapTrimmer":
        """See ``CascadingMethod.start_cascade``."""
        budget = self.kept_tokens(prompt)
        assert budget is not None
        return SnapTrimmer(self, budget)

    def best(
        self, keys: SequenceKeys, queries: Float32Array, layer: int, budget: int
    ) -> list[Int32Array]:
        """Return what each KV head of a layer keeps: the best tokens, then the window.

        Args:
            keys, queries: see ``select``.
            layer: which one.
            budget: tokens to keep.
        """
        count = int(keys.counts[0])
        recent = np.arange(count - self.window, count, dtype=np.int32)
        weights = window_attention(keys, queries, layer)[:, :, : -self.window]
        return [
            np.concatenate((top_keys(scores, budget - self.window), recent))
            for scores in self.scores(weights, keys.config.kv_heads)
        ]

    def scores(self, weights: Float32Array, kv_heads: int) -> Float32Array:
        """Return each token's votes [kv_heads, n]: the window's attention, its neighbours' too.

        Args:
            weights: float32 [query_heads, window, n], columns of the window left out.
            kv_heads: of the model.
        """
        return group_mean(average_pool(weights.sum(axis=1), self.kernel), kv_heads)


class SnapTrimmer:
    """Implements ``methods.evict.cascade.LayerTrimmer``: all layers keep equally many."""

    def __init__(self, method: SnapKV, budget: int) -> None:
        """Begin with a prompt of which ``budget`` tokens per layer stay."""
        self._method, self._budget = method, budget
        self._layers = 0

    def rank(self, keys: SequenceKeys, queries: Float32Array) -> Int32Array:
        """See ``LayerTrimmer.rank``."""
        self._layers += 1
        return np.stack(self._method.best(keys, queries, 0, self._budget))

    def sizes(self) -> Int64Array:
        """See ``LayerTrimmer.sizes``."""
        return np.full(self._layers, self._budget, np.int64)
