"""CAKE: one budget for all layers, divided by how widely and how changeably each attends.

Source: Qin et al., "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences",
ICLR 2025, arXiv 2503.12491, sections 4.1 (preferences), 4.2 (the cascade), 4.3 (scores). One-shot,
it decides once the whole prompt is computed. As a cascade, it trims each layer of the prompt as
soon as it has run, and all layers before it again: in the end it keeps the same, unless a layer's
budget would have grown again.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from midfill.methods.budget import (
    budget_tokens,
    check_budget,
    check_cascade,
    check_observation,
    require,
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
class Cake(OneShot):
    """The method's hyper-parameters.

    Attributes:
        budget: mean number of tokens kept per layer, the window included, or a share of the prompt
            if below 1.
        window: the prompt's last rows, which are observed and always kept; the paper's 32.
        gamma: weight of a token's variance over the rows beside its mean; the paper's 200.
        tau1, tau2: temperatures of dispersion and shift in a layer's preference. The paper tunes
            them per model and budget, 0.4 to 2.3; 1 where nobody has.
        kernel: width of the pooling along tokens; the code's 5.
        cascade: 1 trims while the prompt is prefilled, so that it never holds all slots, and leaves
            nothing of it in the prefix cache; 0 does it once the prompt is computed.
    """

    budget: float = 256
    window: int = 32
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    kernel: int = 5
    cascade: int = 0

    def __post_init__(self) -> None:
        check_observation(self.window, self.kernel, least=2)  # one row has no variance
        check_budget(self.budget, self.window)
        check_cascade(self.cascade)
        for name in ("tau1", "tau2"):
            require(getattr(self, name) > 0, f"{name} must be above 0")

    @property
    def observed_rows(self) -> int:
        """The window's."""
        return self.window

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        count, window = int(keys.counts[0]), self.window
        budget = self.kept_tokens(count)
        if budget is None or queries.shape[1] < window:
            return None
        preferences: list[float] = []
        scores: list[Float32Array] = []
        for layer in range(keys.config.layers):
            weights = window_attention(keys, queries, layer)[:, :, :-window]
            preferences.append(self.preference(weights))
            scores.append(self.scores(weights, keys.config.kv_heads))
        total = (budget - window) * len(scores)
        budgets = divide_budget(np.array(preferences), total, count - window)
        recent = np.arange(count - window, count, dtype=np.int32)
        kept: list[Int32Array] = [
            np.concatenate((top_keys(head, int(layer_budget)), recent))
            for layer_scores, layer_budget in zip(scores, budgets, strict=True)
            for head in layer_scores
        ]
        return Selection.of_heads(kept)

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
        return None if prompt <= budget + self.window else budget

    def start_cascade(self, config: ModelConfig, prompt: int) -> "CakeTrimmer":
        """See ``CascadingMethod.start_cascade``."""
        return CakeTrimmer(self, config, prompt)

    def preference(self, weights: Float32Array) -> float:
        """Return a layer's preference H^(1/tau1) * V^(1/tau2), equation 5.

        Args:
            weights: float32 [query_heads, window, n], columns of the window left out.
        """
        dispersion = -float((weights * np.log(weights + 1e-10)).sum(dtype=np.float64))
        shift = float(weights.var(axis=1, ddof=1, dtype=np.float64).sum())
        return float(max(dispersion, 0.0) ** (1 / self.tau1) * shift ** (1 / self.tau2))

    def scores(self, weights: Float32Array, kv_heads: int) -> Float32Array:
        """Return each token's score [kv_heads, n]: mean + gamma * variance, equation 8.

        Args:
            weights: as of ``preference``.
            kv_heads: of the model.
        """
        variance = weights.var(axis=1, ddof=1)
        varied = weights.mean(axis=1) + np.float32(self.gamma) * variance
        return group_mean(average_pool(varied, self.kernel), kv_heads)


class CakeTrimmer:
    """Implements ``methods.evict.cascade.LayerTrimmer``."""

    def __init__(self, cake: Cake, config: ModelConfig, prompt: int) -> None:
        """Begin with a prompt that doesn't stay as a whole; arguments as of ``start_cascade``."""
        budget = cake.kept_tokens(prompt)
        assert budget is not None
        self._cake = cake
        self._kv_heads = config.kv_heads
        self._total = (budget - cake.window) * config.layers
        self._others = prompt - cake.window
        self._preferences: list[float] = []

    def rank(self, keys: SequenceKeys, queries: Float32Array) -> Int32Array:
        """See ``LayerTrimmer.rank``: the window, then all others by their scores."""
        cake, window = self._cake, self._cake.window
        weights = window_attention(keys, queries, 0)[:, :, :-window]
        self._preferences.append(cake.preference(weights))
        scores = cake.scores(weights, self._kv_heads)
        recent = np.arange(self._others, self._others + window, dtype=np.int32)
        return np.stack([np.concatenate((recent, top_keys(head, self._others))) for head in scores])

    def sizes(self) -> Int64Array:
        """See ``LayerTrimmer.sizes``: the budget, divided over the layers so far."""
        preferences = np.array(self._preferences)
        return divide_budget(preferences, self._total, self._others) + self._cake.window


def divide_budget(preferences: Float64Array, total: int, most: int) -> Int64Array:
    """Divide a number of tokens over layers in proportion to their preferences.

    What is beyond ``most`` goes to the other layers in equal parts, and so does what rounding down
    has left. Without usable preferences all layers get the same.

    Args:
        preferences: [layers], not negative.
        total: tokens to divide.
        most: the largest number of tokens that a layer can use.

    Returns:
        [layers]; they add up to ``total``, or to layers * most if that is less.
    """
    layers = len(preferences)
    total = min(total, layers * most)
    norm = preferences.sum()
    usable = np.isfinite(norm) and norm > 0
    shares = preferences / norm if usable else np.full(layers, 1 / layers)
    budgets = np.minimum((shares * total).astype(np.int64), most)
    while (missing := total - int(budgets.sum())) > 0:
        open_layers = np.flatnonzero(budgets < most)
        each, rest = divmod(missing, len(open_layers))
        budgets[open_layers] += each
        budgets[open_layers[:rest]] += 1
        budgets = np.minimum(budgets, most)
    return budgets
