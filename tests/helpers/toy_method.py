"""Methods of compression for engine tests, with no merit of their own."""

from dataclasses import dataclass, field, replace

import numpy as np

from midfill.kv.quantized import QuantizedBlock
from midfill.methods.evict.method import MethodDefaults, OneShot, SequenceKeys
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.methods.quantize.quantizers import quantize_channels, quantize_tokens
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import LayerProbe, SpanLists


@dataclass(frozen=True)
class HalfTheKeys:
    """Has chunks attend to themselves and to half of the keys, those that their last rows attend
    to most; implements PrefillMethod."""

    chunk_tokens: int = 8

    @property
    def variant(self) -> str:
        return repr(self)

    def is_dense(self, first: int, rows: int) -> bool:
        return first == 0 or rows < 3

    def plan(self, probe: LayerProbe) -> SpanLists:
        columns, _ = probe.masses(min(4, probe.rows))
        listed = columns >= np.median(columns)
        listed[:, probe.first :] = True
        return SpanLists.from_mask(listed[None])


@dataclass(frozen=True)
class KeepLoudest:
    """Keeps, per head, one in ``one_of`` of the prompt's keys, and later three in four, with the
    last one: those with the largest products with any query observed since they came, whatever
    their sign."""

    observed_rows: int
    one_of: int = 2
    interval: int = 0
    block_rows: int = 0

    def start(self, config: ModelConfig) -> "LoudestKeys":
        return LoudestKeys(config, self)


@dataclass
class LoudestKeys:
    config: ModelConfig
    method: KeepLoudest
    loudest: list[np.ndarray] = field(default_factory=list)
    seen: int = 0
    decided: bool = False

    def fork(self) -> "LoudestKeys":
        loudest = [scores.copy() for scores in self.loudest]
        return LoudestKeys(self.config, self.method, loudest, self.seen, self.decided)

    def observe(self, keys: SequenceKeys, queries: np.ndarray) -> None:
        assert not self.decided
        assert keys.counts[0] % self.method.block_rows == 0
        assert 1 <= queries.shape[1] <= self.method.block_rows
        self.seen += queries.shape[1]
        self._hear(keys, queries)

    def select(self, keys: SequenceKeys, queries: np.ndarray) -> Selection | None:
        if self.decided:
            new = int(keys.counts[0]) - len(self.loudest[0])
            assert new >= self.method.interval
            assert queries.shape[1] == min(self.method.observed_rows, new)
        else:
            assert queries.shape[1] + self.seen == min(self.method.observed_rows, keys.counts[0])
            assert not self.method.block_rows or queries.shape[1] <= self.method.block_rows
        self._hear(keys, queries)
        later, self.decided = self.decided, True
        if keys.counts[0] < 4:
            return None
        kept = []
        for scores in self.loudest:
            scores[-1] = np.inf
            count = len(scores) - len(scores) // 4 if later else len(scores) // self.method.one_of
            kept.append(np.sort(np.argsort(-scores, kind="stable")[:count]))
        self.loudest = [scores[own] for scores, own in zip(self.loudest, kept, strict=True)]
        return Selection.of_heads(kept)

    def _hear(self, keys: SequenceKeys, queries: np.ndarray) -> None:
        for head in range(keys.heads):
            found, _ = keys.read(head)
            assert np.isfinite(found).all()
            products = np.abs(queries[head // self.config.kv_heads, :, 0] @ found.T).max(axis=0)
            if head == len(self.loudest):
                self.loudest.append(np.zeros(0, np.float32))
            known = self.loudest[head]
            scores = np.concatenate((known, np.zeros(len(found) - len(known), np.float32)))
            self.loudest[head] = np.maximum(scores, products)


@dataclass(frozen=True)
class RoundOlder(OneShot):
    """Quantises all keys but the last ``recent``, and later those that are not quantised yet.

    Of each head h, it leaves h % 2 of the keys that it could quantise as they are.
    """

    recent: int
    interval: int = 0
    bits: int = 8

    def select(self, keys: SequenceKeys, queries: np.ndarray) -> Selection | None:
        count = int(keys.counts.min()) - self.recent
        if count < 2:
            return None
        kept, blocks = [], []
        for head, held in enumerate(keys.counts):
            own = np.arange(head % 2, count, dtype=np.int32)
            vectors = keys.read(head, own)
            encoded = (
                quantize_channels(vectors[0], self.bits),
                quantize_tokens(vectors[1], self.bits),
            )
            blocks.append([QuantizedBlock.of(*encoded)])
            kept.append(np.setdiff1d(np.arange(held, dtype=np.int32), own))
        return Selection.of_heads(kept, quantized=blocks)


@dataclass(frozen=True)
class FailsAfter(MethodDefaults):
    """Fails when it decides for the ``time``-th time; adds NaN instead if ``with_nan``."""

    time: int
    with_nan: bool = False
    interval: int = 4

    def start(self, config: ModelConfig) -> "Failing":
        return Failing(self)


@dataclass
class Failing:
    method: FailsAfter
    asked: int = 0

    def fork(self) -> "Failing":
        return Failing(self.method, self.asked)

    def observe(self, keys: SequenceKeys, queries: np.ndarray) -> None:
        raise AssertionError("it observes nothing")

    def select(self, keys: SequenceKeys, queries: np.ndarray) -> Selection | None:
        self.asked += 1
        if self.asked < self.method.time:
            return None
        if not self.method.with_nan:
            raise ValueError("no idea")
        count = int(keys.counts[0])
        ends = np.arange(keys.heads + 1, dtype=np.int32)
        nothing = np.full((keys.heads, 12), np.nan, np.float32)
        added = AddedKeys(nothing, nothing, ends)
        return replace(Selection.of_tokens(np.arange(count), keys.heads), added=added)
