"""CacheBlend: of text whose KV comes from elsewhere, recompute the tokens that differ most.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion",
EuroSys 2025, arXiv 2405.16444, section 4. With K or V of a token in the check layer, copied and
computed here, its deviation is

    D_j = sum over heads and channels of (computed - copied)^2

and the largest ``ratio`` of all D are computed on. The paper checks several layers in turn and
shrinks the choice from one to the next; its prototype checks one, as this does.
"""

from dataclasses import dataclass

import numpy as np

from midfill.arrays import Int64Array
from midfill.methods.budget import require
from midfill.methods.reuse.method import LayerKV, require_layer_above
from midfill.methods.served_model import ServedModel

NAME = "cacheblend"
_COMPARED = ("values", "keys")


@dataclass(frozen=True)
class CacheBlend:
    """Implements ``methods.reuse.method.ReuseMethod``.

    Attributes:
        ratio: share of the copied tokens that are computed again, rounded up; 0: none, 1: all.
        check_layer: the layer in which KV is compared, from 0.
        compare: "values" or "keys".
        min_run: the least number of consecutive tokens that are copied.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    ratio: float = 0.15
    check_layer: int = 1
    compare: str = "values"
    min_run: int = 16

    def __post_init__(self) -> None:
        require(0.0 <= self.ratio <= 1.0, f"ratio must be from 0 to 1, not {self.ratio:g}", NAME)
        require(
            self.check_layer >= 0, f"check_layer must be 0 or more, not {self.check_layer}", NAME
        )
        require(
            self.compare in _COMPARED,
            f"compare must be {' or '.join(_COMPARED)}, not {self.compare!r}",
            NAME,
        )
        require(self.min_run >= 1, f"min_run must be at least 1, not {self.min_run}", NAME)

    def for_model(self, model: ServedModel) -> "CacheBlend":
        """Return the method; see ``require_layer_above`` for errors."""
        require_layer_above(self.check_layer, model, NAME)
        return self

    def recomputed(self, copied: int) -> int:
        """See ``ReuseMethod.recomputed``."""
        return int(np.ceil(self.ratio * copied))

    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        """See ``ReuseMethod.select``; of equal deviations, the first token's counts."""
        old, new = getattr(copied, self.compare), getattr(computed, self.compare)
        deviation = np.square(new - old).sum(axis=(1, 2))
        ranked = np.argsort(-deviation, kind="stable")
        chosen: Int64Array = np.sort(ranked[: self.recomputed(len(deviation))])
        return chosen
