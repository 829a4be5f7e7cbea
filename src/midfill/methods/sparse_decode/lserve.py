"""LServe: half of the KV heads stream, and the others read a fixed number of pages.

Source: Yang et al., "LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention",
MLSys 2025, arXiv 2502.14866: static sparsity (section 3.3), page selection and its hierarchical
pages (3.4, 3.5.1), the reusable page selector (3.5.2).

The heads that stream are DuoAttention's, by its gates: they keep the first and the last tokens from
the prompt's end on, and the others' slots are freed. Rows of an answer read, in each query head of
the other KV heads, the newest page of 64 keys and the best ones before it. Prompts are computed
with all keys here, and their KV is shared like any other.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray
from midfill.methods.budget import require
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict import duoattention
from midfill.methods.evict.streaming_heads import (
    HeadSplit,
    StreamingRule,
    check_rule,
    refuse_windows,
)
from midfill.methods.served_model import ServedModel, refuse_quantized_cache
from midfill.methods.sparse_decode.method import (
    ChosenPages,
    PageChoice,
    SparseDecodeMethod,
)
from midfill.models.config import ModelConfig
from midfill.runners.forward.page_selection import PageRule, SelectionRule

NAME = "lserve"
PAGE, SUMMARY = 64, 16
"""The reference's physical and logical page."""
LEAST_PAGES = 3


@dataclass(frozen=True)
class LServe:
    """The method's hyper-parameters.

    Attributes:
        budget: keys that a row reads in heads that don't stream, a multiple of 64; the paper's 4096
            are for contexts of 32,000 tokens and more.
        static: share of the KV heads that stream; the paper's 0.5.
        sinks, recent: first and last tokens that these keep; the reference's 128 and 256.
        interval: rows choose pages anew at positions that are multiples of it; the paper's 4.
    """

    budget: int = 512
    static: float = 0.5
    sinks: int = 128
    recent: int = 256
    interval: int = 4

    def __post_init__(self) -> None:
        require(
            self.budget >= LEAST_PAGES * PAGE and self.budget % PAGE == 0,
            f"budget must be a multiple of {PAGE} tokens, from {LEAST_PAGES * PAGE} on,"
            f" not {self.budget}",
        )
        require(0 <= self.static <= 1, f"static must be from 0 to 1, not {self.static:g}")
        require(self.interval >= 1, f"interval must be at least 1, not {self.interval}")
        check_rule(self.streaming_rule)

    @property
    def streaming_rule(self) -> StreamingRule:
        """What heads that stream keep; they drop the rest every 32 tokens."""
        return StreamingRule(self.sinks, self.recent)

    @property
    def selection_rule(self) -> PageRule:
        """What the other heads read."""
        return PageRule(self.budget // PAGE, PAGE, SUMMARY)

    def for_model(self, model: ServedModel) -> "SparseDecodeMethod":
        """See ``ModelSpecific.for_model``."""
        refuse_quantized_cache(NAME, model)
        if not self.static:
            return ChosenPages(self.selection_rule, self.interval)
        refuse_windows(f"{NAME} with heads that stream (static above 0)", model.config)
        gates = load_tables(duoattention.NAME, duoattention.VERSION, model)["gates"]
        retrieval = tuple(duoattention.retrieval_heads(gates, self.static).tolist())
        return SplitPages(self.streaming_rule, retrieval, self.selection_rule, self.interval)


@dataclass(frozen=True)
class SplitPages(HeadSplit):
    """Heads that stream, and others that choose pages; implements ``SparseDecodeMethod``, too.

    Attributes:
        selection_rule, choice_interval, page_choice: see ``SparseDecodeMethod``.
    """

    selection_rule: SelectionRule
    choice_interval: int
    page_choice: PageChoice | None = None

    def choosing_heads(self, config: ModelConfig) -> BoolArray:
        """See ``SparseDecodeMethod``: the retrieval heads."""
        return np.array(self.retrieval, bool).reshape(config.layers, config.kv_heads)
