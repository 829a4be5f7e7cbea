"""Nulls of methods of reuse: as many tokens are computed again, but not those that they choose.

Those of KVCOMM compute as many, with other offsets or none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, cast

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int64Array
from midfill.methods.method import Method
from midfill.methods.registry import resolve_method
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.reuse.cachecraft import CacheCraft
from midfill.methods.reuse.kvcomm import KVComm
from midfill.methods.reuse.kvshare import KVShare
from midfill.methods.reuse.method import LayerKV


@dataclass(frozen=True)
class RandomRows(CacheBlend):
    """Tokens at random, which follow from the copied tokens alone."""

    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        """See ``ReuseMethod.select``."""
        seed = blake2b(computed.keys.tobytes(), digest_size=16).digest()
        count = len(computed.keys)
        drawn = np.random.default_rng(list(seed)).choice(
            count, self.recomputed(count), replace=False
        )
        chosen: Int64Array = np.sort(drawn).astype(np.int64)
        return chosen


@dataclass(frozen=True)
class FirstRows(CacheBlend):
    """The first of the copied tokens."""

    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        """See ``ReuseMethod.select``."""
        return np.arange(self.recomputed(len(computed.keys)), dtype=np.int64)


@dataclass(frozen=True)
class RandomTokens(CacheCraft):
    """Tokens of each chunk at random, which follow from its statistics alone."""

    def repaired(self, scores: Float32Array, overhead: float) -> Int64Array:
        """See ``CacheCraft.repaired``."""
        return _random(scores, int(np.ceil(overhead * len(scores))))


@dataclass(frozen=True)
class FirstTokens(CacheCraft):
    """The first tokens of each chunk."""

    def repaired(self, scores: Float32Array, overhead: float) -> Int64Array:
        """See ``CacheCraft.repaired``."""
        return np.arange(int(np.ceil(overhead * len(scores))), dtype=np.int64)


@dataclass(frozen=True)
class RandomCopies(KVShare):
    """As many copied tokens as KVShare repairs at first, at random."""

    def repaired(
        self, deviation: Float64Array, size: Float64Array, attention: Float64Array
    ) -> Int64Array:
        """See ``KVShare.repaired``."""
        return _random(deviation, len(super().repaired(deviation, size, attention)))


@dataclass(frozen=True)
class FirstCopies(KVShare):
    """As many of the first copied tokens."""

    def repaired(
        self, deviation: Float64Array, size: Float64Array, attention: Float64Array
    ) -> Int64Array:
        """See ``KVShare.repaired``."""
        return np.arange(len(super().repaired(deviation, size, attention)), dtype=np.int64)


@dataclass(frozen=True)
class NoOffsets(KVComm):
    """Base KV, keys turned to their places, and no offsets."""

    def content_weights(self, content: Float32Array, bases: Sequence[Float32Array]) -> Float64Array:
        """See ``KVComm.content_weights``."""
        return np.zeros_like(super().content_weights(content, bases))

    def segment_weights(self, content: Float32Array, bases: Sequence[Float32Array]) -> Float64Array:
        """See ``KVComm.segment_weights``."""
        return np.zeros_like(super().segment_weights(content, bases))


@dataclass(frozen=True)
class MeanOfAnchors(KVComm):
    """The mean of all anchors' offsets."""

    def content_weights(self, content: Float32Array, bases: Sequence[Float32Array]) -> Float64Array:
        """See ``KVComm.content_weights``."""
        return np.full_like(super().content_weights(content, bases), 1 / len(bases))

    def segment_weights(self, content: Float32Array, bases: Sequence[Float32Array]) -> Float64Array:
        """See ``KVComm.segment_weights``."""
        return np.full_like(super().segment_weights(content, bases), 1 / len(bases))


@dataclass(frozen=True)
class RandomAnchor(KVComm):
    """The offsets of one anchor, which follows from the number of tokens and of anchors."""

    def content_weights(self, content: Float32Array, bases: Sequence[Float32Array]) -> Float64Array:
        """See ``KVComm.content_weights``."""
        return self._one(super().content_weights(content, bases), content.shape[2])

    def segment_weights(self, content: Float32Array, bases: Sequence[Float32Array]) -> Float64Array:
        """See ``KVComm.segment_weights``."""
        return self._one(super().segment_weights(content, bases), content.shape[2])

    def _one(self, weights: Float64Array, tokens: int) -> Float64Array:
        chosen = np.random.default_rng([tokens, len(weights)]).integers(len(weights))
        found = np.zeros_like(weights)
        found[chosen] = 1.0
        return found


def _random(numbers: Float32Array | Float64Array, count: int) -> Int64Array:
    """Return so many of the numbers' places, ascending; they follow from the numbers."""
    seed = blake2b(numbers.tobytes(), digest_size=16).digest()
    drawn = np.random.default_rng(list(seed)).permutation(len(numbers))
    chosen: Int64Array = np.sort(drawn[:count])
    return chosen.astype(np.int64)


_ROW_NULLS = {"random tokens": RandomRows, "first tokens": FirstRows}
_CHUNK_NULLS = {"random tokens": RandomTokens, "first tokens": FirstTokens}
_COPY_NULLS = {"random tokens": RandomCopies, "first tokens": FirstCopies}
_ANCHOR_NULLS = {
    "no offsets": NoOffsets, "random anchor": RandomAnchor, "mean of anchors": MeanOfAnchors,
}  # fmt: skip


def reuse_nulls(specifications: Sequence[str]) -> dict[str, tuple[str, Method]]:
    """Return the nulls of the methods that choose tokens to compute again, or offsets.

    Args:
        specifications: of methods of reuse.

    Returns:
        By name, the specification of a null's method, and the null.
    """
    found: dict[str, tuple[str, Method]] = {}
    for specification in specifications:
        method = resolve_method(specification)
        for title, null in _nulls_of(method).items():
            options = fields(cast(Any, method))
            settings = {option.name: getattr(method, option.name) for option in options}
            found[f"{specification} {title}"] = (specification, null(**settings))
    return found


def _nulls_of(method: object) -> Mapping[str, Callable[..., Method]]:
    """Return classes of nulls by title; none where a method has nothing to choose."""
    if isinstance(method, KVComm):
        return _ANCHOR_NULLS
    if isinstance(method, CacheCraft) and method.alpha:
        return _CHUNK_NULLS
    if isinstance(method, KVShare) and method.ratio:
        return _COPY_NULLS
    if isinstance(method, CacheBlend) and 0 < method.ratio < 1:
        return _ROW_NULLS
    return {}
