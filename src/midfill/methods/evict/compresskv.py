"""CompressKV: the few heads of a layer that find evidence decide for all of them.

Source: Lin et al., "CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before
Generation", 2025, arXiv 2508.02401, sections 3.2 (semantic retrieval heads) and 3.3 (budgets of
layers). The heads and how much each layer's output suffers from eviction are measured once per
model, see ``compresskv_search``.

In the prompt's last rows, the chosen query heads' attention is added up over rows, pooled along
tokens and averaged over these heads; all KV heads of a layer keep the same tokens. Prompts no
longer than the mean budget keep everything.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from midfill.methods.budget import budget_tokens, check_budget, check_observation, require
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.method import CompressionMethod, OneShot, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import average_pool, head_attention, top_keys
from midfill.methods.served_model import ServedModel

NAME, VERSION = "compresskv", 1


@dataclass(frozen=True)
class CompressKV:
    """The method's hyper-parameters.

    Attributes:
        budget: mean number of tokens kept per layer, the window included, or a share of the prompt
            if below 1.
        heads: how many query heads of each layer decide; the paper's 4.
        window: the prompt's last rows, which are observed and always kept; the paper's 8.
        kernel: width of the pooling along tokens; the code's 5.
        least: the least budget of a layer, if the mean isn't less; the paper's 32.
        most: the largest budget of a layer, as a multiple of the mean; the paper's 3.
    """

    budget: float = 256
    heads: int = 4
    window: int = 8
    kernel: int = 5
    least: int = 32
    most: float = 3.0

    def __post_init__(self) -> None:
        check_observation(self.window, self.kernel)
        check_budget(self.budget, self.window)
        require(self.heads >= 1, f"heads must be at least 1, not {self.heads}")
        require(
            self.least > self.window,
            f"least must be above the window's {self.window}, not {self.least}",
        )
        require(self.most >= 1, f"most must be 1 or more, not {self.most:g}")

    def for_model(self, model: ServedModel) -> CompressionMethod:
        """See ``ModelSpecific.for_model``."""
        full = FullLayers.required_by(NAME, model.config)
        tables, config = load_tables(NAME, VERSION, model), model.config
        heads, errors = tables["heads"], tables["errors"]
        require(
            heads.shape == (config.layers, config.query_heads) and errors.shape == (config.layers,),
            f"{NAME}: the tables are of a model with other layers or heads",
        )
        ranked = np.argsort(-heads[full.layers], axis=1, kind="stable")[:, : self.heads]
        layers = tuple(tuple(layer) for layer in ranked.tolist())
        return RetrievalVotes(self, layers, tuple(errors[full.layers].tolist()))


@dataclass(frozen=True)
class RetrievalVotes(OneShot):
    """The method with what it knows of a model.

    Attributes:
        method: the hyper-parameters.
        heads: of each layer, the query heads that decide.
        errors: of each layer, how much its output suffers.
    """

    method: CompressKV
    heads: tuple[tuple[int, ...], ...]
    errors: tuple[float, ...]

    @property
    def observed_rows(self) -> int:
        """The window's."""
        return self.method.window

    @property
    def only_drops(self) -> bool:
        """See ``DroppingMethod.only_drops``."""
        return True

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        count, method = int(keys.counts[0]), self.method
        budget = budget_tokens(method.budget, count, method.window)
        if count <= budget or queries.shape[1] < method.window:
            return None
        least = min(method.least, budget)
        budgets = layer_budgets(np.array(self.errors), budget, least, int(method.most * budget))
        kept: list[Int32Array] = []
        for layer, size in enumerate(budgets.tolist()):
            chosen = vote(keys, queries, layer, self.heads[layer], size, method.kernel)
            kept += [chosen] * keys.config.kv_heads
        return Selection.of_heads(kept)


def vote(
    keys: SequenceKeys,
    queries: Float32Array,
    layer: int,
    heads: tuple[int, ...],
    size: int,
    kernel: int,
) -> Int32Array:
    """Return the tokens that a layer keeps, in order: [size] int32, or all if there are fewer.

    Args:
        keys: of the prompt.
        queries: float32 [layers, window, query_heads, head_dim], of its last rows.
        layer: which one.
        heads: the query heads that decide.
        size: tokens to keep, those of the window included.
        kernel: width of the pooling.
    """
    count, window = int(keys.counts[0]), queries.shape[1]
    if count <= size:
        return np.arange(count, dtype=np.int32)
    votes = head_votes(keys, queries, layer, heads, kernel)
    recent = np.arange(count - window, count, dtype=np.int32)
    return np.concatenate((np.sort(top_keys(votes, size - window)), recent))


def head_votes(
    keys: SequenceKeys, queries: Float32Array, layer: int, heads: tuple[int, ...], kernel: int
) -> Float32Array:
    """Return the votes for a layer's tokens before the window: float32 [n].

    Their sum over the heads, which ranks tokens as their mean does. Arguments as of ``vote``.
    """
    window, group = queries.shape[1], keys.config.query_heads // keys.config.kv_heads
    votes = np.zeros(int(keys.counts[0]) - window, np.float32)
    for kv_head in sorted({head // group for head in heads}):
        weights = head_attention(keys, queries, layer * keys.config.kv_heads + kv_head)
        for head in heads:
            if head // group == kv_head:
                votes += average_pool(weights[head % group, :, :-window].sum(axis=0), kernel)
    return votes


def layer_budgets(errors: Float64Array, mean: int, least: int, most: int) -> Int64Array:
    """Divide a budget over layers in proportion to their errors, section 3.3.

    Args:
        errors: [layers], not negative; all equal or all 0 give equal budgets.
        mean: tokens per layer.
        least, most: of a layer; least <= mean <= most.

    Returns:
        [layers] int64, whose sum is layers * mean.
    """
    layers = len(errors)
    norm = errors.sum()
    shares = errors / norm if norm > 0 else np.full(layers, 1 / layers)
    wanted = least + np.round(shares * (mean - least) * layers).astype(np.int64)
    budgets: Int64Array = np.clip(wanted, least, most)
    descending = np.argsort(-errors, kind="stable")
    while (missing := mean * layers - int(budgets.sum())) != 0:
        step, order = (1, descending) if missing > 0 else (-1, descending[::-1])
        limit = most if missing > 0 else least
        movable = order[budgets[order] != limit][: abs(missing)]
        budgets[movable] += step
    return budgets
