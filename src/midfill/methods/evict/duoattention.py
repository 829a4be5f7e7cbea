"""DuoAttention: all keys for retrieval heads, sinks and recent keys for streaming heads.

Source: Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and
Streaming Heads", ICLR 2025, arXiv 2410.10819, sections 2.2 (gates) and 2.3 (deployment).

Heads are told apart by gates that are trained once per model, see ``duoattention_gates``. Keys keep
their positions. By default prompts are computed with all keys, as in the reference's dynamic path:
their KV is exact, and the next request finds it; streaming heads drop theirs at the end. With
``chunk``, streaming heads attend to sinks and recent keys alone while a prompt is computed, too
(section 2.3, prefilling), and prompts share KV only with others under the method.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from midfill.arrays import BoolArray, Float64Array
from midfill.methods.budget import require
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict.method import CompressionMethod
from midfill.methods.evict.streaming_heads import (
    HeadSplit,
    StreamingRule,
    check_rule,
    refuse_windows,
)
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_prefill.method import ChunkRule
from midfill.runners.forward.attention import QUERY_BLOCK, LayerProbe, SpanLists

NAME, VERSION = "duoattention", 1


@dataclass(frozen=True)
class DuoAttention:
    """The method's hyper-parameters.

    Attributes:
        sparsity: share of the KV heads that stream; the paper's 0.5 for models with grouped
            queries, 0.75 for others.
        sinks: first tokens that streaming heads keep; the paper's 64.
        recent: last tokens that they keep; the paper's 256.
        interval: how many tokens the answer grows by until they drop tokens again; the paper's 1.
            0 keeps all of the answer.
        chunk: tokens per chunk of a prompt that streaming heads stream through, a multiple of 64; 0
            computes prompts with all keys.
    """

    sparsity: float = 0.5
    sinks: int = 64
    recent: int = 256
    interval: int = 32
    chunk: int = 0

    def __post_init__(self) -> None:
        check_rule(self.rule)
        if self.chunk:
            ChunkRule(self.chunk, 0)
        require(0 <= self.sparsity <= 1, f"sparsity must be from 0 to 1, not {self.sparsity:g}")

    @property
    def rule(self) -> StreamingRule:
        """What streaming heads keep."""
        return StreamingRule(self.sinks, self.recent, interval=self.interval)

    def for_model(self, model: ServedModel) -> CompressionMethod:
        """See ``ModelSpecific.for_model``."""
        refuse_windows(NAME, model.config)
        gates = load_tables(NAME, VERSION, model)["gates"]
        retrieval = tuple(retrieval_heads(gates, self.sparsity).tolist())
        if not self.chunk:
            return HeadSplit(self.rule, retrieval)
        options = f"sparsity={self.sparsity:g},sinks={self.sinks},recent={self.recent}"
        variant = f"{NAME}:{options},chunk={self.chunk}"
        return StreamingPrefill(self.rule, retrieval, variant, self.chunk)


@dataclass(frozen=True)
class StreamingPrefill(HeadSplit):
    """Streaming heads that stream through the prompt as well; implements ``PrefillMethod``, too.

    Attributes:
        variant, chunk_tokens: see ``PrefillMethod``.
    """

    variant: str
    chunk_tokens: int

    def is_dense(self, first: int, rows: int) -> bool:
        """See ``PrefillMethod``."""
        return first + rows <= self.rule.sinks + self.rule.recent

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``.

        A block of rows attends to the recent keys of its first one, so its others see up to 63
        more than ``recent``, as the rows of the paper's chunks do.
        """
        own = self.retrieval[probe.layer * probe.kv_heads :][: probe.kv_heads]
        whole = np.repeat(own, probe.query_heads // probe.kv_heads)
        lists: list[list[tuple[int, int]]] = []
        for start in range(probe.first, probe.first + probe.rows, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, probe.first + probe.rows)
            recent = max(start - self.rule.recent + 1, 0)
            streamed = [(0, self.rule.sinks), (recent, end)]
            if recent <= self.rule.sinks or not self.rule.sinks:
                streamed = [(recent if not self.rule.sinks else 0, end)]
            lists += ([(0, end)] if all_keys else streamed for all_keys in whole)
        indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
        return SpanLists(indptr, np.array(list(chain(*lists)), np.int32))


def retrieval_heads(gates: Float64Array, sparsity: float) -> BoolArray:
    """Return which KV heads are retrieval heads: bool [layers * kv_heads].

    The heads with the smallest gates of the model stream; of equal ones the first.

    Args:
        gates: [layers, kv_heads], from 0 to 1.
        sparsity: share of the heads that stream.
    """
    found = np.ones(gates.size, bool)
    order = np.argsort(gates.reshape(-1), kind="stable")
    found[order[: round(sparsity * gates.size)]] = False
    return found
