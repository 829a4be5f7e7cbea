"""Streaming heads: all keys for some KV heads; sinks and recent keys for the others.

What RazorAttention and DuoAttention have in common. They differ in how they find the heads that
need all keys (retrieval heads), and in what becomes of the keys that the others (streaming heads)
drop: RazorAttention leaves their mean behind, as one key that weighs as many.

The prompt is computed exactly, and the streaming heads drop keys at its end. While the answer grows
they drop more of them.
"""

import copy
from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array
from midfill.errors import InvalidRequestError
from midfill.kv.ragged import KeyTerms
from midfill.methods.budget import require
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.models.config import ModelConfig


@dataclass(frozen=True)
class StreamingRule:
    """What streaming heads keep.

    Attributes:
        sinks: first keys that stay.
        recent: last keys that stay, at least.
        share: last keys that stay, at least, as a share of all keys.
        interval: how many tokens the answer grows by until they drop keys again; 0 keeps all of it.
        mean: whether one key with the dropped ones' mean stays in their place.
    """

    sinks: int
    recent: int
    share: float = 0.0
    interval: int = 32
    mean: bool = False

    def last(self, length: int) -> int:
        """Return how many of the last of ``length`` keys stay, at least."""
        return max(self.recent, int(self.share * length))

    def excess(self, length: int) -> int:
        """Return how many of ``length`` keys are dropped."""
        return max(length - self.sinks - self.last(length), 0)


@dataclass(frozen=True)
class HeadSplit(MethodDefaults):
    """A method with the heads of one model: implements ``CompressionMethod``.

    Attributes:
        rule: what streaming heads keep.
        retrieval: one per layer and KV head: whether it keeps all keys.
    """

    rule: StreamingRule
    retrieval: tuple[bool, ...]

    @property
    def interval(self) -> int:
        """The rule's."""
        return self.rule.interval

    def start(self, config: ModelConfig) -> "StreamingHeads":
        """Return a compressor for a new sequence."""
        return StreamingHeads(self, config.head_dim)


class StreamingHeads:
    """Implements ``SequenceCompressor``: drops keys of the streaming heads.

    Attributes:
        dropped: how many keys each streaming head has dropped.
        key_sums, value_sums: float64 [heads, head_dim], their sums; zeros for retrieval heads.
    """

    def __init__(self, split: HeadSplit, head_dim: int) -> None:
        self._rule = split.rule
        self._retrieval = split.retrieval
        self.dropped = 0
        shape = (len(split.retrieval), head_dim)
        self.key_sums: Float64Array = np.zeros(shape)
        self.value_sums: Float64Array = np.zeros(shape)

    def fork(self) -> "StreamingHeads":
        """See ``SequenceCompressor.fork``."""
        twin = copy.copy(self)
        twin.key_sums, twin.value_sums = self.key_sums.copy(), self.value_sums.copy()
        return twin

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing: positions alone decide."""

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        if all(self._retrieval):
            return None
        streaming = self._retrieval.index(False)
        means = int(self._rule.mean and self.dropped > 0)
        length = int(keys.counts[streaming]) - means + self.dropped
        leaving = self._rule.excess(length) - self.dropped
        if leaving <= 0:
            return None
        # A streaming head's keys are the mean, if there is one, the sinks, then the others.
        first = means + self._rule.sinks
        count = int(keys.counts[streaming])
        kept_here = np.delete(np.arange(count, dtype=np.int32), np.s_[first : first + leaving])
        kept_here = kept_here[means:]
        kept: list[Int32Array] = [
            np.arange(keys.counts[head], dtype=np.int32) if whole else kept_here
            for head, whole in enumerate(self._retrieval)
        ]
        self.dropped += leaving
        if not self._rule.mean:
            return Selection.of_heads(kept)
        left = np.arange(first, first + leaving, dtype=np.int32)
        for head, whole in enumerate(self._retrieval):
            if not whole:
                found, values = keys.read(head, left)
                self.key_sums[head] += found.sum(axis=0, dtype=np.float64)
                self.value_sums[head] += values.sum(axis=0, dtype=np.float64)
        return Selection.of_heads(kept, self._means())

    def _means(self) -> AddedKeys:
        """Return the mean key of each streaming head; its score grows by the log of its weight.

        RazorAttention, equation 7: exp(q.k) of the mean counts once for each dropped key.
        """
        streaming = ~np.array(self._retrieval)
        count = int(streaming.sum())
        ends = np.concatenate(([0], np.cumsum(streaming)))
        terms = KeyTerms.neutral(count)
        terms.score_bias[:] = np.log(self.dropped)
        return AddedKeys(
            keys=(self.key_sums[streaming] / self.dropped).astype(np.float32),
            values=(self.value_sums[streaming] / self.dropped).astype(np.float32),
            indptr=ends.astype(np.int32),
            terms=terms,
        )


def check_rule(rule: StreamingRule) -> None:
    """Check a rule that a user has written.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    for name, least in (("sinks", 0), ("recent", 1), ("interval", 0)):
        value = getattr(rule, name)
        require(value >= least, f"{name} must be at least {least}, not {value}")
    require(0 <= rule.share < 1, f"share must be from 0 to below 1, not {rule.share:g}")


def refuse_windows(name: str, config: ModelConfig) -> None:
    """Refuse a model whose layers don't see the whole text.

    Raises:
        InvalidRequestError: some layers have a sliding window.
    """
    windows = {config.window_of(layer) for layer in range(config.layers)} - {None}
    if any(window < config.context for window in windows if window is not None):
        raise InvalidRequestError(
            f"{name} needs a model whose layers see the whole text; layers of this one see"
            f" {min(window for window in windows if window is not None)} tokens",
            param="method",
        )
