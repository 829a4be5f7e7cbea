"""TreeSearch: hyper-parameters of methods whose rows find keys by a tree search.

Source: Lee et al., arXiv 2406.09827; defaults of the reference's version 1.1,
DeepAuto-AI/hip-attention. The search is that of ``runners.forward.tree_search``.
"""

from dataclasses import dataclass

from midfill.methods.budget import require
from midfill.runners.forward.page_selection import Search
from midfill.runners.forward.tree_search import TreeRule

REPRESENTATIVES = {"centre": Search.CENTRES, "first": Search.FIRSTS}


@dataclass(frozen=True)
class TreeSearch:
    """What is searched, and what is read in any case.

    Attributes:
        k: keys that a search chooses, a multiple of ``block``; 0 leaves window and sinks.
        window: last keys that every row reads.
        sinks: first keys that every row reads.
        block: keys per block.
        dense_layers: first layers in which rows read all keys.
        representative: the block that a node is scored by, "centre" or "first".
    """

    k: int = 512
    window: int = 256
    sinks: int = 16
    block: int = 2
    dense_layers: int = 3
    representative: str = "centre"

    def __post_init__(self) -> None:
        require(self.block >= 1, f"block must be at least 1, not {self.block}")
        require(
            self.k >= 0 and self.k % self.block == 0,
            f"k must be a multiple of block, {self.block}, from 0 on, not {self.k}",
        )
        require(self.window >= 1, f"window must be at least 1, not {self.window}")
        require(self.sinks >= 0, f"sinks must be at least 0, not {self.sinks}")
        require(self.dense_layers >= 0, f"dense_layers must be at least 0, not {self.dense_layers}")
        require(
            self.representative in REPRESENTATIVES,
            f"representative must be centre or first, not {self.representative!r}",
        )

    @property
    def tree_rule(self) -> TreeRule:
        """What rows read, and how they search."""
        search = REPRESENTATIVES[self.representative]
        return TreeRule(self.k // self.block, self.block, self.window, self.sinks, search)
