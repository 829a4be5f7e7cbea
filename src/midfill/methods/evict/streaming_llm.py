"""StreamingLLM: keep the first tokens, which attention falls back on, and the last ones.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
arXiv 2309.17453, section 3.2.

Applied once, to the prompt. The paper evicts while it decodes, too, and numbers positions within
the cache; completions are short, so here the answer's own tokens stay, at their true positions.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array
from midfill.compression.method import SequenceKeys
from midfill.compression.selection import Selection
from midfill.errors import InvalidRequestError
from midfill.methods.budget import budget_tokens, check_budget
from midfill.models.config import ModelConfig


@dataclass(frozen=True)
class StreamingLLM:
    """The method's hyper-parameters.

    Attributes:
        budget: tokens kept per layer, or a share of the prompt if below 1.
        sinks: how many of them are the first ones; the paper's 4.
    """

    budget: float = 256
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise InvalidRequestError(f"sinks can't be {self.sinks}", param="method")
        check_budget(self.budget, self.sinks)

    @property
    def observed_rows(self) -> int:
        """None: the choice depends on positions alone."""
        return 0

    def start(self, config: ModelConfig) -> "StreamingLLM":
        """Return the method itself; it has no state."""
        return self

    def fork(self) -> "StreamingLLM":
        """Return the method itself; it has no state."""
        return self

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        count = int(keys.counts[0])
        budget = budget_tokens(self.budget, count, self.sinks)
        if count <= budget:
            return None
        recent = count - (budget - self.sinks)
        kept = np.concatenate((np.arange(self.sinks), np.arange(recent, count)))
        return Selection.of_tokens(kept.astype(np.int32), keys.heads)
