"""CacheBlend: of text whose KV comes from elsewhere, recompute the tokens that differ most.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion",
EuroSys 2025, arXiv 2405.16444, section 4. With K or V of a token in the check layer, copied and
computed here, its deviation is

    D_j = sum over heads and channels of (computed - copied)^2

and the largest ``ratio`` of all D are computed on. The paper checks several layers in turn and
shrinks the choice from one to the next; its prototype checks one, as this does.

``order=caret`` is ours: as many tokens are computed on, but those nearest to the caret in the
document's text, whatever they deviate by. An answer attends to them most.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int64Array
from midfill.methods.reuse.method import (
    LayerKV,
    require_layer_above,
    require_least,
    require_one_of,
    require_shares,
)
from midfill.methods.reuse.sequence import BlendedSequence, ReuseKind
from midfill.methods.sequence_method import RequestFacts, SequenceMethod, SequenceView
from midfill.methods.served_model import ServedModel

NAME = "cacheblend"
_COMPARED = ("values", "keys")
_ORDERS = ("deviation", "caret")


@dataclass(frozen=True)
class CacheBlend:
    """Implements ``methods.reuse.method.ReuseMethod`` and ``sequence.OwnSequences``.

    Attributes:
        ratio: share of the copied tokens that are computed again, rounded up; 0: none, 1: all.
        check_layer: the layer in which KV is compared, from 0.
        compare: "values" or "keys".
        min_run: the least number of consecutive tokens that are copied.
        order: which tokens are computed again first: "deviation", those with the largest D, or
            "caret", those nearest to the caret; ``compare`` doesn't count then.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    ratio: float = 0.15
    check_layer: int = 1
    compare: str = "values"
    min_run: int = 16
    order: str = "deviation"

    def __post_init__(self) -> None:
        require_shares(self, NAME, "ratio")
        require_least(0, self, NAME, "check_layer")
        require_one_of(_COMPARED, self, NAME, "compare")
        require_least(1, self, NAME, "min_run")
        require_one_of(_ORDERS, self, NAME, "order")

    def for_model(self, model: ServedModel) -> "CacheBlend":
        """Return the method; see ``require_layer_above`` for errors."""
        require_layer_above(self.check_layer, model, NAME)
        return self

    def attach(self, name: str, request: RequestFacts, shared: ReuseKind) -> BlendedSequence | None:
        """See ``OwnSequences.attach``."""
        if self.order == "caret":
            return NearestSequence(name, self, shared, caret_distances(request))
        return BlendedSequence(name, self, shared)

    def recomputed(self, copied: int) -> int:
        """See ``ReuseMethod.recomputed``."""
        return int(np.ceil(self.ratio * copied))

    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        """See ``ReuseMethod.select``; of equal deviations, the first token's counts."""
        old, new = getattr(copied, self.compare), getattr(computed, self.compare)
        return self.best(np.square(new - old).sum(axis=(1, 2)))

    def best(self, scores: Float32Array | Float64Array | Int64Array) -> Int64Array:
        """Return the tokens with the largest of [n] scores, as many as are computed again.

        Ascending; of equal scores, the first token's counts.
        """
        ranked = np.argsort(-scores, kind="stable")
        chosen: Int64Array = np.sort(ranked[: self.recomputed(len(scores))])
        return chosen


class NearestSequence(BlendedSequence):
    """CacheBlend by the distance to the caret, at work on one sequence.

    Args:
        name, method, shared: see ``BlendedSequence``.
        distances: of ``caret_distances``, of the prompt's tokens.
    """

    def __init__(
        self, name: str, method: CacheBlend, shared: ReuseKind, distances: Int64Array
    ) -> None:
        super().__init__(name, method, shared)
        self._blend_method = method
        self._distances = distances

    def fork(self) -> SequenceMethod:
        """See ``SequenceMethod``."""
        return NearestSequence(self.name, self._blend_method, self.shared, self._distances)

    def choose(
        self, sequence: SequenceView, numbers: Int64Array, copied: LayerKV, computed: LayerKV
    ) -> Int64Array:
        """See ``BlendedSequence``; of equal distances, the first token's counts."""
        return self._blend_method.best(-self._distances[numbers])


def caret_distances(request: RequestFacts) -> Int64Array:
    """Return how many tokens of the document are between each token and the caret: [n] int64.

    Tokens that are not the document's text, other files and sentinels, are farther than all that
    are, the nearer the later they come. Without a caret, that is so of all tokens.
    """
    count = request.prompt
    distances = 2 * count - np.arange(count)
    for side, nearest_last in ((request.before_caret, True), (request.after_caret, False)):
        spans = [np.arange(start, min(end, count)) for start, end in side]
        numbers = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        order = np.arange(len(numbers))
        distances[numbers] = order[::-1] if nearest_last else order
    return distances
