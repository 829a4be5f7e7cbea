"""DuoAttention: all keys for retrieval heads, sinks and recent keys for streaming heads.

Source: Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and
Streaming Heads", ICLR 2025, arXiv 2410.10819, sections 2.2 (gates) and 2.3 (deployment).

Heads are told apart by gates that are trained once per model, see ``duoattention_gates``. Keys keep
their positions. As in the reference's dynamic path, the prompt is computed with all keys, as its KV
is what the next request finds; streaming heads drop theirs at its end.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray, Float64Array
from midfill.compression.method import CompressionMethod, ServedModel
from midfill.errors import InvalidRequestError
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict.streaming_heads import (
    HeadSplit,
    StreamingRule,
    check_rule,
    refuse_windows,
)

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
    """

    sparsity: float = 0.5
    sinks: int = 64
    recent: int = 256
    interval: int = 32

    def __post_init__(self) -> None:
        check_rule(self.rule)
        if not 0 <= self.sparsity <= 1:
            raise InvalidRequestError(
                f"sparsity must be from 0 to 1, not {self.sparsity:g}", param="method"
            )

    @property
    def rule(self) -> StreamingRule:
        """What streaming heads keep."""
        return StreamingRule(self.sinks, self.recent, interval=self.interval)

    def for_model(self, model: ServedModel) -> CompressionMethod:
        """See ``ModelSpecific.for_model``."""
        refuse_windows(NAME, model.config)
        gates = load_tables(NAME, VERSION, model)["gates"]
        return HeadSplit(self.rule, tuple(retrieval_heads(gates, self.sparsity).tolist()))


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
