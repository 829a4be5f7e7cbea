"""RazorAttention: all keys for retrieval heads; the others keep sinks, recent keys and one mean.

Source: Tang et al., "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads",
ICLR 2025, arXiv 2407.15891, sections 3.2 (head search) and 3.3 (compensation token, equation 7).

Heads are ranked by how much they attend to earlier occurrences of the token (echo) and to what
followed these (induction), see ``razorattention_search``. The paper keeps 4,000 recent tokens at
least, for contexts of up to 100k; 256 suit the contexts of completions.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray
from midfill.methods.budget import require
from midfill.methods.calibration import Tables
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict.method import CompressionMethod
from midfill.methods.evict.streaming_heads import (
    HeadSplit,
    StreamingRule,
    check_rule,
    refuse_windows,
)
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME, VERSION = "razorattention", 1


@dataclass(frozen=True)
class RazorAttention:
    """The method's hyper-parameters.

    Attributes:
        induction, echo: share of all KV heads that keep all keys, by either score; the paper's 0.14
            and 0.01.
        sinks: first tokens that the others keep; the paper's 4.
        recent: last tokens that they keep, at least.
        share: last tokens that they keep, at least, as a share of the text; the paper's 1/5.
        mean: 1 leaves the mean of what they drop, 0 leaves nothing.
        interval: how many tokens the answer grows by until they drop tokens again; the paper's 1.
            0 keeps all of the answer.
    """

    induction: float = 0.14
    echo: float = 0.01
    sinks: int = 4
    recent: int = 256
    share: float = 0.2
    mean: int = 1
    interval: int = 32

    def __post_init__(self) -> None:
        check_rule(self.rule)
        for name in ("induction", "echo"):
            require(0 <= getattr(self, name) <= 1, f"{name} must be from 0 to 1")
        require(self.mean in (0, 1), f"mean must be 0 or 1, not {self.mean}")

    @property
    def rule(self) -> StreamingRule:
        """What heads keep that are no retrieval heads."""
        return StreamingRule(self.sinks, self.recent, self.share, self.interval, bool(self.mean))

    def for_model(self, model: ServedModel) -> CompressionMethod:
        """See ``ModelSpecific.for_model``."""
        refuse_windows(NAME, model.config)
        tables = load_tables(NAME, VERSION, model)
        heads = retrieval_heads(tables, model.config, self.induction, self.echo)
        return HeadSplit(self.rule, tuple(heads.tolist()))


def retrieval_heads(
    tables: Tables, config: ModelConfig, induction: float, echo: float
) -> BoolArray:
    """Return which KV heads are retrieval heads: bool [layers * kv_heads].

    A KV head's score is the highest of its query heads'. Ranks are over the whole model.

    Args:
        tables: "induction" and "echo", [layers, query_heads].
        config: the model.
        induction, echo: shares of all KV heads.
    """
    found = np.zeros(config.layers * config.kv_heads, bool)
    for name, share in (("induction", induction), ("echo", echo)):
        scores = tables[name].reshape(len(found), -1).max(axis=1)
        found[np.argsort(-scores, kind="stable")[: round(share * len(found))]] = True
    return found
