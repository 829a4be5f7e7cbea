"""Other scores by which CacheBlend could choose what it computes again, for jumps of the caret.

CacheBlend takes the tokens whose KV deviates most. These take as many: the nearest to the caret in
the text (its own ``order=caret``), those that the prompt's last tokens attend to most, or those
with the largest product of that attention and the deviation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int64Array
from midfill.methods.method import Method
from midfill.methods.registry import resolve_method
from midfill.methods.reuse.attention import head_weights
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.reuse.method import LayerKV
from midfill.methods.reuse.sequence import BlendedSequence, ReuseKind
from midfill.methods.sequence_method import RequestFacts, SequenceMethod, SequenceView

NEAREST = "nearest"
SCORES = {NEAREST: "near", "attention": "attention", "deviation x attention": "both"}
"""What each is called in tables, and in code."""
_LAST = 32  # rows whose attention counts


@dataclass(frozen=True)
class ScoredBlend(CacheBlend):
    """CacheBlend by another score; implements ``methods.reuse.sequence.OwnSequences``.

    Attributes:
        score: "attention" or "both".
    """

    score: str = "attention"

    def attach(self, name: str, request: RequestFacts, shared: ReuseKind) -> BlendedSequence | None:
        """See ``OwnSequences.attach``."""
        return ScoredSequence(name, self, shared)


class ScoredSequence(BlendedSequence):
    """``ScoredBlend`` at work on one sequence."""

    def __init__(self, name: str, method: ScoredBlend, shared: ReuseKind) -> None:
        super().__init__(name, method, shared)
        self._scored = method
        self._ran: list[tuple[Int64Array, Float32Array]] = []

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        super().restart()
        self._ran = []

    def fork(self) -> SequenceMethod:
        """See ``SequenceMethod``."""
        return ScoredSequence(self.name, self._scored, self.shared)

    def observed_layers(self, first: int, end: int) -> range:
        """See ``BlendedSequence``: the check layer's, where all rows run."""
        return range(self.check_layer, end) if first == 0 and self.blends else range(0)

    def observe_rows(
        self, sequence: SequenceView, rows: Int64Array, layer: int, queries: Float32Array
    ) -> None:
        """See ``BlendedSequence``: keep the last rows' queries."""
        self._ran = [*self._ran, (rows[-_LAST:], queries[-_LAST:].copy())][-_LAST:]

    def choose(
        self, sequence: SequenceView, numbers: Int64Array, copied: LayerKV, computed: LayerKV
    ) -> Int64Array:
        """See ``BlendedSequence``."""
        method = self._scored
        attention = self._attention(sequence)[numbers]
        if method.score == "attention":
            return method.best(attention)
        old, new = copied.values.astype(np.float64), computed.values.astype(np.float64)
        return method.best(attention * np.square(new - old).sum(axis=(1, 2)))

    def _attention(self, sequence: SequenceView) -> Float64Array:
        """Return the attention that the last rows which ran pay to each token before: [n]."""
        assert sequence.kv is not None
        rows = np.concatenate([rows for rows, _ in self._ran])[-_LAST:]
        queries = np.concatenate([queries for _, queries in self._ran])[-_LAST:]
        self._ran = []
        keys = self.read_keys(sequence.kv.slots[: int(rows[-1]) + 1], self.check_layer)
        config = self.shared.runner.config
        weights = head_weights(config, self.check_layer, queries, keys, rows)
        received: Float64Array = weights.sum(axis=0, dtype=np.float64)
        return received


def score_names(specifications: Sequence[str]) -> dict[str, str]:
    """Return what CacheBlends by other scores are called, and the specification of each."""
    return {
        f"{specification} {title}": specification
        for specification in specifications
        if isinstance(method := resolve_method(specification), CacheBlend) and 0 < method.ratio < 1
        for title in SCORES
    }


def score_methods(specifications: Sequence[str]) -> dict[str, Method]:
    """Return CacheBlends by other scores, by their names."""
    found: dict[str, Method] = {}
    for name, specification in score_names(specifications).items():
        method = resolve_method(specification)
        assert isinstance(method, CacheBlend)
        title = name.removeprefix(f"{specification} ")
        found[name] = (
            replace(method, order="caret")
            if title == NEAREST
            else ScoredBlend(
                method.ratio,
                method.check_layer,
                method.compare,
                method.min_run,
                score=SCORES[title],
            )
        )
    return found
