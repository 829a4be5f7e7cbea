"""HiP: rows read the keys that a tree search finds, the first and the last ones.

Source: Lee et al., "A Training-free Sub-quadratic Cost Transformer Model Serving Framework with
Hierarchically Pruned Attention", ICLR 2025, arXiv 2406.09827; defaults of the reference's version
1.1, DeepAuto-AI/hip-attention.

Rows of an answer search in each query head, by their own queries. Where the paper slides the window
with every row, here it begins where it did at the last search, so that no key falls between the two
(``runners.forward.tree_search``). Prompts are computed with all keys here, and their KV is shared
like any other; ``methods.sparse_prefill.hip_prefill`` searches while they are computed.
"""

from dataclasses import dataclass

from midfill.methods.budget import require
from midfill.methods.served_model import ServedModel, refuse_quantized_cache
from midfill.methods.sparse_decode.method import ChosenPages
from midfill.methods.tree_options import TreeSearch


@dataclass(frozen=True)
class Hip(TreeSearch):
    """The method's hyper-parameters.

    Attributes:
        k, window, sinks, block, dense_layers, representative: see ``TreeSearch``.
        refresh: rows search anew at positions that are multiples of it.
    """

    refresh: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.refresh >= 1, f"refresh must be at least 1, not {self.refresh}")

    def for_model(self, model: ServedModel) -> ChosenPages:
        """See ``ModelSpecific.for_model``."""
        refuse_quantized_cache("hip", model)
        return ChosenPages(self.tree_rule, self.refresh, dense_layers=self.dense_layers)
