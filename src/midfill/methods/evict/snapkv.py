"""SnapKV: keep what the prompt's last rows attend to, head by head.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024,
arXiv 2404.14469, section 4.2. Query heads that share a KV head vote together (mean).
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.compression.method import SequenceKeys
from midfill.compression.method_defaults import OneShot
from midfill.compression.selection import Selection
from midfill.compression.window_attention import (
    average_pool,
    group_mean,
    top_keys,
    window_attention,
)
from midfill.methods.budget import budget_tokens, check_budget, check_observation


@dataclass(frozen=True)
class SnapKV(OneShot):
    """The method's hyper-parameters.

    Attributes:
        budget: tokens kept per layer and head, the window included, or a share of the prompt if
            below 1.
        window: the prompt's last rows, which vote and are always kept; the paper's 32.
        kernel: width of the pooling that keeps a token's neighbours with it; the code's 5.
    """

    budget: float = 256
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        check_observation(self.window, self.kernel)
        check_budget(self.budget, self.window)

    @property
    def observed_rows(self) -> int:
        """The window's."""
        return self.window

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        count = int(keys.counts[0])
        budget = budget_tokens(self.budget, count, self.window)
        if count <= budget or queries.shape[1] < self.window:
            return None
        kept: list[Int32Array] = []
        recent = np.arange(count - self.window, count, dtype=np.int32)
        for layer in range(keys.config.layers):
            weights = window_attention(keys, queries, layer)
            votes = average_pool(weights[:, :, : -self.window].sum(axis=1), self.kernel)
            for scores in group_mean(votes, keys.config.kv_heads):
                kept.append(np.concatenate((top_keys(scores, budget - self.window), recent)))
        return Selection.of_heads(kept)
