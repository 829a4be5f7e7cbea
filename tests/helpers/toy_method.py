"""KeepLoudest: a method of compression for engine tests, with no merit of its own."""

from dataclasses import dataclass

import numpy as np

from midfill.compression.method import SequenceKeys
from midfill.compression.selection import Selection
from midfill.models.config import ModelConfig


@dataclass(frozen=True)
class KeepLoudest:
    """Keeps, per head, half of the keys and the last one: those with the largest products with the
    observed queries, whatever their sign. Or another part of them, one in ``one_of``."""

    observed_rows: int
    one_of: int = 2

    def start(self, config: ModelConfig) -> "LoudestKeys":
        return LoudestKeys(config, self.observed_rows, self.one_of)


@dataclass
class LoudestKeys:
    config: ModelConfig
    observed_rows: int
    one_of: int

    def fork(self) -> "LoudestKeys":
        return self

    def select(self, keys: SequenceKeys, queries: np.ndarray) -> Selection | None:
        assert queries.shape[1] == min(self.observed_rows, keys.counts[0])
        if keys.counts[0] < 4:
            return None
        kept = []
        for head in range(keys.heads):
            found, _ = keys.read(head)
            assert np.isfinite(found).all()
            scores = np.abs(queries[head // self.config.kv_heads, :, 0] @ found.T).max(axis=0)
            scores[-1] = np.inf
            kept.append(np.argsort(-scores, kind="stable")[: len(found) // self.one_of])
        return Selection.of_heads(kept)
