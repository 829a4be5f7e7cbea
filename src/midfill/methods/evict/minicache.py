"""MiniCache: two neighbouring layers share one key and one value per token, each with own norms.

Source: Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
NeurIPS 2024, arXiv 2405.14366. From the middle of the network on, layers are taken in pairs. The
two keys of a token, and its two values, become one direction, found by spherical interpolation
(SLERP) between theirs; each layer's norm is kept, as the factor by which its list of keys counts
the shared cell. Tokens whose two directions differ most keep both.

With norms m and directions u of layers l - 1 and l, and the angle Omega between the directions:

    e = sin((1 - t) Omega) / sin(Omega) * u[l-1] + sin(t Omega) / sin(Omega) * u[l],  |e| = 1
    x[l-1] = m[l-1] * e,  x[l] = m[l] * e

Differences: directions are merged per KV head, not per token. A cell holds a key and a value, so a
token is kept unmerged in a head with both or neither: those tokens that stand highest in either of
the two rankings by distance. The prompt is computed exactly and merged once it is; tokens of the
answer are merged in blocks. The paper's quantisation is the KV cache's own (``--kv-cache-dtype``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Float64Array, Int32Array
from midfill.kv.ragged import KeyTerms
from midfill.methods.budget import check_interval, require
from midfill.methods.evict.method import CompressionMethod, MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.methods.evict.streaming_heads import refuse_windows
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME = "minicache"
_LEAST_SINE = 1e-6
_LEAST_NORM = 1e-30


@dataclass(frozen=True)
class MergedVectors:
    """One vector for each pair of vectors.

    Attributes:
        shared: float32 [n, head_dim].
        lower, upper: float32 [n], by how much it counts in the place of either.
    """

    shared: Float32Array
    lower: Float32Array
    upper: Float32Array


Merge = Callable[[Float32Array, Float32Array], MergedVectors]
"""Merges vectors [n, head_dim] of a pair's lower layer with those of its upper one."""


@dataclass(frozen=True)
class MiniCache:
    """The method's hyper-parameters.

    Attributes:
        first: lower layer of the first pair, or a share of the layers if below 1; the paper's half.
        t: how near the shared direction lies to the upper layer's, from 0 to 1; the paper's 0.6.
        retain: share of the tokens that stay unmerged, per pair and KV head, or of the range of
            distances, see ``by``; the paper's 0.05.
        by: "count" retains the share ``retain`` of the tokens; "range", the paper's rule, those
            whose distance is among the highest share ``retain`` of the range of distances.
        recent: last tokens that are not merged yet.
        interval: how many tokens the answer grows by until they are merged, too; 0 merges none.
    """

    first: float = 0.5
    t: float = 0.6
    retain: float = 0.05
    by: str = "count"
    recent: int = 0
    interval: int = 32

    def __post_init__(self) -> None:
        require(
            0 <= self.first < math.inf and (self.first < 1 or self.first == int(self.first)),
            f"first must be a layer's number, or a share of the layers below 1, not {self.first:g}",
        )
        for name in ("t", "retain"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} must be from 0 to 1, not {value:g}")
        require(self.by in ("count", "range"), f"by must be count or range, not {self.by!r}")
        require(self.recent >= 0, f"recent must be 0 or more tokens, not {self.recent}")
        check_interval(self.interval)

    def for_model(self, model: ServedModel) -> CompressionMethod:
        """See ``ModelSpecific.for_model``."""
        refuse_windows(NAME, model.config)
        layers = model.config.layers
        require(
            self.first <= layers,
            f"first must be at most the model's {layers} layers, not {self.first:g}",
            NAME,
        )
        return MergedLayers(self, self._slerp)

    def _slerp(self, lower: Float32Array, upper: Float32Array) -> MergedVectors:
        return slerp(lower, upper, self.t)


@dataclass(frozen=True)
class MergedLayers(MethodDefaults):
    """The method for one model: implements ``CompressionMethod``.

    Attributes:
        settings: the hyper-parameters.
        merge: merges keys, and values.
    """

    settings: MiniCache
    merge: Merge

    @property
    def interval(self) -> int:
        """The settings'."""
        return self.settings.interval

    def start(self, config: ModelConfig) -> "MergedTokens":
        """Return a compressor for a new sequence."""
        return MergedTokens(self)


@dataclass
class MergedTokens:
    """Implements ``SequenceCompressor``.

    Each head holds all tokens at all times. Those that were merged or retained come first: the
    shared cells of the last block, then of the one before it, and so on, then retained tokens.

    Attributes:
        layers: the method.
        decided: how many tokens were merged or retained.
    """

    layers: MergedLayers
    decided: int = 0

    def fork(self) -> "MergedTokens":
        """See ``SequenceCompressor.fork``."""
        return replace(self)

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing: keys and values alone decide."""

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        end = int(keys.counts[0]) - self.layers.settings.recent
        if end <= self.decided:
            return None
        block, self.decided = np.arange(self.decided, end, dtype=np.int32), end
        kv_heads, settings = keys.config.kv_heads, self.layers.settings
        merged = _MergedHeads(keys)
        for layer in lower_layers(keys.config.layers, settings.first):
            for head in range(layer * kv_heads, (layer + 1) * kv_heads):
                self._merge(keys, head, block, merged)
        return merged.selection()

    def _merge(
        self, keys: SequenceKeys, head: int, block: Int32Array, merged: "_MergedHeads"
    ) -> None:
        """Merge a block's tokens in a head of a lower layer and the same head of the upper one."""
        settings, above = self.layers.settings, head + keys.config.kv_heads
        lower, upper = keys.read(head, block), keys.read(above, block)
        found = np.stack([distances(low, high) for low, high in zip(lower, upper, strict=True)])
        leaving = ~retained(found, settings.retain, settings.by)
        if leaving.any():
            both = [
                self.layers.merge(low[leaving], high[leaving])
                for low, high in zip(lower, upper, strict=True)
            ]
            merged.add(head, above, block[leaving], both[0], both[1])


class _MergedHeads:
    """What a decision merges, head by head.

    Args:
        keys: of the sequence.
    """

    def __init__(self, keys: SequenceKeys) -> None:
        nothing = np.zeros(0, np.int32)
        self._kept: list[Int32Array] = [np.arange(n, dtype=np.int32) for n in keys.counts]
        self._replaced: list[Int32Array] = [nothing] * keys.heads
        self._listed: list[Int32Array] = [nothing] * keys.heads
        self._terms = [KeyTerms.neutral(0)] * keys.heads
        self._keys: list[Float32Array] = []
        self._values: list[Float32Array] = []
        self._stored = 0

    def add(
        self,
        head: int,
        above: int,
        tokens: Int32Array,
        keys: MergedVectors,
        values: MergedVectors,
    ) -> None:
        """Have two heads list the same cells in the place of some of their keys: [n] int32."""
        listed = np.arange(self._stored, self._stored + len(tokens), dtype=np.int32)
        none = np.zeros(len(tokens), np.float32)
        for owner, part in ((head, "lower"), (above, "upper")):
            self._kept[owner] = np.delete(self._kept[owner], tokens)
            self._replaced[owner], self._listed[owner] = tokens, listed
            self._terms[owner] = KeyTerms(getattr(keys, part), none, getattr(values, part))
        self._keys.append(keys.shared)
        self._values.append(values.shared)
        self._stored += len(tokens)

    def selection(self) -> Selection | None:
        """Return it; None if nothing was merged."""
        if not self._stored:
            return None
        ends = np.cumsum([0, *(len(listed) for listed in self._listed)]).astype(np.int32)
        terms = KeyTerms(
            np.concatenate([each.score_factor for each in self._terms]),
            np.concatenate([each.score_bias for each in self._terms]),
            np.concatenate([each.value_factor for each in self._terms]),
        )
        added = AddedKeys(
            np.concatenate(self._keys),
            np.concatenate(self._values),
            ends,
            terms,
            listed=np.concatenate(self._listed),
            replaced=np.concatenate(self._replaced),
        )
        return Selection.of_heads(self._kept, added)


def lower_layers(layers: int, first: float) -> range:
    """Return the lower layer of each pair; the last layer has no partner if it is left alone.

    Args:
        layers: of the model.
        first: see ``MiniCache``.
    """
    start = round(first * layers) if first < 1 else int(first)
    return range(start, layers - 1, 2)


def slerp(lower: Float32Array, upper: Float32Array, t: float) -> MergedVectors:
    """Merge vectors by spherical interpolation of their directions, and keep their norms.

    Where directions are equal or opposite, the interpolation is linear; where that gives nothing,
    or a vector is zero, the other direction is taken.

    Args:
        lower, upper: float32 [n, head_dim].
        t: 0 gives the lower directions, 1 the upper ones.
    """
    (below, lower_norms), (above, upper_norms) = _directions(lower), _directions(upper)
    angles = _angles(below, above)[:, None]
    sines = np.sin(angles)
    curved = sines > _LEAST_SINE
    divisor = np.where(curved, sines, 1)
    first = np.where(curved, np.sin((1 - t) * angles) / divisor, 1 - t)
    second = np.where(curved, np.sin(t * angles) / divisor, t)
    merged, lengths = _directions(first * below + second * above)
    fallback = np.where(upper_norms[:, None] > 0, above, below)
    merged = np.where(lengths[:, None] > _LEAST_SINE, merged, fallback)
    return MergedVectors(
        merged.astype(np.float32), lower_norms.astype(np.float32), upper_norms.astype(np.float32)
    )


def distances(lower: Float32Array, upper: Float32Array) -> Float64Array:
    """Return the angle between each two vectors, divided by pi: float64 [n], from 0 to 1.

    Args:
        lower, upper: float32 [n, head_dim].
    """
    return _angles(_directions(lower)[0], _directions(upper)[0]) / np.pi


def retained(found: Float64Array, share: float, by: str) -> BoolArray:
    """Return which tokens stay unmerged, those with the largest distances: bool [n].

    Args:
        found: [2, n], distances of keys and of values.
        share, by: ``retain`` and ``by`` of ``MiniCache``. "count" retains as many, rounded up.
    """
    if by == "range":
        most, least = found.max(axis=1, keepdims=True), found.min(axis=1, keepdims=True)
        far: BoolArray = (found > most - share * (most - least)).any(axis=0)
        return far
    count = found.shape[1]
    ranks = np.empty(found.shape, np.int64)
    order = np.argsort(-found, axis=1, kind="stable")
    np.put_along_axis(ranks, order, np.arange(count)[None], axis=1)
    chosen = np.zeros(count, bool)
    most_distant = np.argsort(ranks.min(axis=0), kind="stable")
    chosen[most_distant[: math.ceil(share * count - 1e-9)]] = True
    return chosen


def _directions(vectors: Float32Array | Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return unit vectors [n, head_dim], zeros for zeros, and norms [n], in float64."""
    wide = vectors.astype(np.float64)
    norms = np.sqrt((wide * wide).sum(axis=1))
    return wide / np.maximum(norms, _LEAST_NORM)[:, None], norms


def _angles(lower: Float64Array, upper: Float64Array) -> Float64Array:
    """Return the angles between unit vectors [n, head_dim], from 0 to pi: [n]."""
    angles: Float64Array = np.arccos(np.clip((lower * upper).sum(axis=1), -1, 1))
    return angles
