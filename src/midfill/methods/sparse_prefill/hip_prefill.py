"""HiP while a prompt is computed: blocks of rows read the keys that a tree search finds.

Source: Lee et al., "A Training-free Sub-quadratic Cost Transformer Model Serving Framework with
Hierarchically Pruned Attention", ICLR 2025, arXiv 2406.09827; defaults of the reference's version
1.1, DeepAuto-AI/hip-attention.

Every block of 64 rows (the paper's have 32) searches in each query head, by every second of its
queries: a block of keys scores the most that any of them gives it. Where the paper slides the
window with every row, here it begins where it does for the block's first row, so that later rows
see up to 63 keys more. ``methods.sparse_decode.hip`` searches while the answer is written.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray, Int32Array
from midfill.methods.served_model import ServedModel, refuse_quantized_cache
from midfill.methods.sparse_prefill.method import ChunkRule
from midfill.methods.tree_options import TreeSearch
from midfill.runners.forward.attention import QUERY_BLOCK, LayerProbe, SpanLists
from midfill.runners.forward.tree_search import TreeRule

STRIDE = 2
"""Rows of a block that search: one in so many; the reference's."""


@dataclass(frozen=True)
class HipPrefill(TreeSearch):
    """The method's hyper-parameters; implements ``PrefillMethod``.

    Attributes:
        k, window, sinks, block, dense_layers, representative: see ``TreeSearch``.
        chunk: tokens per chunk.
        dense: chunks whose last row sees at most so many keys attend to all.
    """

    chunk: int = 1024
    dense: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        ChunkRule(self.chunk, self.dense)

    def for_model(self, model: ServedModel) -> "HipPrefill":
        """See ``ModelSpecific.for_model``."""
        refuse_quantized_cache("hip-prefill", model)
        return self

    @property
    def variant(self) -> str:
        """See ``PrefillMethod``."""
        return repr(self)

    @property
    def chunk_tokens(self) -> int:
        """See ``PrefillMethod``."""
        return self.chunk

    def is_dense(self, first: int, rows: int) -> bool:
        """See ``PrefillMethod``."""
        return ChunkRule(self.chunk, self.dense).is_dense(first, rows)

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        if probe.layer < self.dense_layers:
            return SpanLists.of_everything(probe.query_heads, probe.first, probe.rows)
        chosen = probe.search(self.tree_rule, STRIDE)
        return SpanLists.from_mask(listed_keys(chosen, self.tree_rule, probe.first, probe.rows))


def listed_keys(chosen: Int32Array, rule: TreeRule, first: int, rows: int) -> BoolArray:
    """Return which keys blocks of rows read under their choices: [blocks, query_heads, keys].

    Args:
        chosen: [blocks, query_heads, width], as ``LayerProbe.search`` returns it.
        rule: what they were found by.
        first: position of the first row.
        rows: how many there are.
    """
    tails, blocks = chosen[..., :1], chosen[..., 1:]
    numbers = np.arange(first + rows, dtype=np.int32)
    listed: BoolArray = (numbers >= tails) | (numbers < rule.sinks)
    unit = np.arange(tails.size).reshape(tails.shape)
    for offset in range(rule.block):
        # The last block may reach into the window; -1 stands for no block.
        found = rule.sinks + blocks * rule.block + offset
        inside = (blocks >= 0) & (found < tails)
        listed.reshape(-1, len(numbers))[
            np.broadcast_to(unit, found.shape)[inside], found[inside]
        ] = True
    ends = first + np.arange(1, len(chosen) + 1) * QUERY_BLOCK
    listed &= (numbers < ends[:, None])[:, None]
    return listed
