"""StreamingLLM: keep the first tokens, which attention falls back on, and the last ones.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
arXiv 2309.17453, section 3.2. The paper numbers keys within the cache: the first one that stays has
position 0, the next 1, and so on. Here they have the same distances, see ``Selection.close_gaps``,
and an answer may outgrow the model's context as it does there.

The paper's prompts go through the rolling cache, too. Here a prompt is computed exactly, as its KV
is what the next request finds, and cut once it is.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array
from midfill.methods.budget import budget_tokens, check_budget, check_interval, require
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.models.config import ModelConfig


@dataclass(frozen=True)
class StreamingLLM(MethodDefaults):
    """The method's hyper-parameters.

    Attributes:
        budget: tokens kept per layer, or a share of the prompt if below 1.
        sinks: how many of them are the first ones; the paper's 4.
        interval: how many tokens the answer grows by until the window moves again; the paper's 1.
            0 keeps all of the answer.
    """

    budget: float = 256
    sinks: int = 4
    interval: int = 16

    def __post_init__(self) -> None:
        require(self.sinks >= 0, f"sinks can't be {self.sinks}")
        check_budget(self.budget, self.sinks)
        check_interval(self.interval)

    def held_tokens(self, prompt: int, config: ModelConfig) -> int | None:
        """See ``RollingMethod``."""
        held = budget_tokens(self.budget, prompt, self.sinks) + self.interval
        return held if self.interval else None

    def start(self, config: ModelConfig) -> "RollingWindow":
        """Return the window of one sequence."""
        return RollingWindow(self)


class RollingWindow:
    """Sinks and window of one sequence."""

    def __init__(self, method: StreamingLLM, budget: int = 0) -> None:
        """Begin with a prompt; ``budget``, in tokens, is known once that is."""
        self._method = method
        self._budget = budget

    def fork(self) -> "RollingWindow":
        """See ``SequenceCompressor.fork``."""
        return RollingWindow(self._method, self._budget)

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing: positions alone decide."""

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        count, sinks = int(keys.counts[0]), self._method.sinks
        self._budget = self._budget or budget_tokens(self._method.budget, count, sinks)
        if count <= self._budget:
            return None
        recent = count - (self._budget - sinks)
        kept = np.concatenate((np.arange(sinks), np.arange(recent, count))).astype(np.int32)
        return dataclasses.replace(Selection.of_tokens(kept, keys.heads), close_gaps=True)
