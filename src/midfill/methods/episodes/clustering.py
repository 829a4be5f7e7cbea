"""Episodes of a conversation: clusters of windows, by vectors of their texts.

Numbers only, no state. The vectors come from a sentence encoder, or, so that nothing need be
downloaded, from the tokens' own input embeddings. Plain means of these say little, since what texts
have in common is larger than what tells them apart:

* From all embeddings their mean and largest common directions are taken, "all but the top" (Mu and
  Viswanath, ICLR 2018, arXiv 1702.01417), hidden / 100 of them; what is left has length 1.
* Frequent tokens count less, a / (a + p) for a token's share p of the history ("SIF", Arora et
  al., ICLR 2017). Of a question, tokens that the history doesn't have don't count: they can't say
  where in it to look.
* From a window's mean the whole history's is taken, and what is left has length 1.

So corrected, they find a fact whose words a question repeats, and no other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array

_RESTARTS, _ITERATIONS = 10, 100
_RARE = 1e-3  # a
_EPSILON = 1e-12


class TokenVectors:
    """Turns input embeddings into vectors that tell topics apart.

    Args:
        sample: float32 [n, hidden], embeddings of tokens from all of the vocabulary.
    """

    def __init__(self, sample: Float32Array) -> None:
        self._mean: Float32Array = sample.mean(axis=0)
        self._top = _top_directions(sample - self._mean, max(sample.shape[1] // 100, 1))

    def of(self, embeddings: Float32Array) -> Float32Array:
        """Return the vectors of [n, hidden] embeddings, of length 1."""
        centred = embeddings - self._mean
        centred -= (centred @ self._top) @ self._top.T
        lengths = np.linalg.norm(centred, axis=1, keepdims=True)
        found: Float32Array = centred / np.maximum(lengths, np.float32(_EPSILON))
        return found


def _top_directions(centred: Float32Array, count: int) -> Float32Array:
    """Return about the first principal directions of [n, hidden] rows: [hidden, count].

    They come from a few rounds of subspace iteration with a fixed start, whatever the width.
    """
    hidden = centred.shape[1]
    width = min(2 * count + 8, *centred.shape)
    found = np.random.default_rng(0).standard_normal((hidden, width), np.float32)
    for _ in range(4):
        found, _ = np.linalg.qr(centred.T @ (centred @ found))
    _, _, turn = np.linalg.svd(centred @ found, full_matrices=False)
    top: Float32Array = (found @ turn.T)[:, :count]
    return top


class Nearness(Protocol):
    """Says how near a text is to each episode."""

    @property
    def nbytes(self) -> int:
        """Memory of the arrays that are its own."""

    def of(self, tokens: Int32Array) -> Float64Array:
        """Return how near a text is to each episode: [episodes], comparable among these only.

        Args:
            tokens: [n] int32, n at least 1.
        """


@dataclass(frozen=True, eq=False)
class Episodes:
    """The topics of one conversation.

    Attributes:
        centroids: float64 [episodes, hidden], of length 1.
        representatives: of each episode, numbers of the windows nearest to its centroid, nearest
            first.
        labels: [windows] int64, the episode of each window.
        nearness: of other texts.
    """

    centroids: Float64Array
    representatives: tuple[Int64Array, ...]
    labels: Int64Array
    nearness: Nearness

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        arrays = (self.centroids, self.labels, *self.representatives)
        return sum(array.nbytes for array in arrays) + self.nearness.nbytes

    def nearest(self, tokens: Int32Array) -> int:
        """Return the episode that a text is nearest to; of equally near ones the first.

        Args:
            tokens: [n] int32, n at least 1.
        """
        return int(np.argmax(self.nearness.of(tokens)))


@dataclass(frozen=True, eq=False)
class TokenNearness:
    """Implements ``Nearness`` by the means of tokens' vectors.

    Attributes:
        tokens: [n] int32, ascending, the different tokens of the history.
        weights: float64 [n], how much each counts.
        products: float64 [episodes, n], the product of each centroid and each token's vector less
            the mean over the history.
    """

    tokens: Int32Array
    weights: Float64Array
    products: Float64Array

    @property
    def nbytes(self) -> int:
        """See ``Nearness.nbytes``."""
        return self.tokens.nbytes + self.weights.nbytes + self.products.nbytes

    def of(self, tokens: Int32Array) -> Float64Array:
        """See ``Nearness.of``."""
        place = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        known = place[self.tokens[place] == tokens]
        # The text's length doesn't change which is nearest, nor does the sum of weights.
        found: Float64Array = self.products[:, known] @ self.weights[known]
        return found


Encode = Callable[[Int32Array], Float64Array]
"""Returns the vector of a text, of length 1, by its tokens."""


@dataclass(frozen=True, eq=False)
class SentenceNearness:
    """Implements ``Nearness`` by a sentence encoder's vectors.

    Attributes:
        centroids: the episodes'.
        encode: the encoder.
    """

    centroids: Float64Array
    encode: Encode

    @property
    def nbytes(self) -> int:
        """See ``Nearness.nbytes``: the centroids are the episodes' own."""
        return 0

    def of(self, tokens: Int32Array) -> Float64Array:
        """See ``Nearness.of``."""
        found: Float64Array = self.centroids @ self.encode(tokens)
        return found


def find_token_episodes(
    tokens: Int32Array,
    bounds: Int32Array,
    vectors: Float32Array,
    count: int,
    near: int,
    seed: int,
) -> Episodes:
    """Divide a conversation into episodes, by the vectors of its tokens.

    Args:
        tokens: [n] int32, the history.
        bounds: [windows + 1] int32, where windows begin, and where the last one ends; one at least.
        vectors: float32 [different tokens, hidden], those of the history's, in order of their ids.
        count: how many episodes; fewer where there are fewer different windows.
        near: how many windows at most represent an episode.
        seed: of the random choices.
    """
    different, rows, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    weights = _RARE / (_RARE + counts / len(tokens))
    means = np.stack([
        weights[part] @ vectors[part] / weights[part].sum()
        for start, end in pairwise(bounds)
        for part in [rows[start:end]]
    ])  # fmt: skip
    common = np.diff(bounds) @ means / (bounds[-1] - bounds[0])
    found = _clusters(unit(means - common), count, near, seed)
    products = found.centroids @ vectors.T - (found.centroids @ common)[:, None]
    return Episodes(*found, TokenNearness(different.astype(np.int32), weights, products))


def find_sentence_episodes(
    points: Float64Array, encode: Encode, count: int, near: int, seed: int
) -> Episodes:
    """Divide a conversation into episodes, by its windows' vectors.

    Args:
        points: [windows, hidden], what ``encode`` has returned for them; one at least.
        encode: the encoder.
        count, near, seed: see ``find_token_episodes``.
    """
    found = _clusters(points, count, near, seed)
    return Episodes(*found, SentenceNearness(found.centroids, encode))


class _Clusters(NamedTuple):
    """See ``Episodes``."""

    centroids: Float64Array
    representatives: tuple[Int64Array, ...]
    labels: Int64Array


def _clusters(points: Float64Array, count: int, near: int, seed: int) -> _Clusters:
    """Divide [windows, hidden] points of length 1."""
    labels, _ = kmeans(points, count, seed)
    centroids = unit(np.stack([points[labels == e].mean(axis=0) for e in range(labels.max() + 1)]))
    representatives = tuple(
        members[np.argsort(-(points[members] @ centroid), kind="stable")][:near]
        for episode, centroid in enumerate(centroids)
        for members in [np.flatnonzero(labels == episode)]
    )
    return _Clusters(centroids, representatives, labels)


def unit(vectors: Float64Array) -> Float64Array:
    """Return [..., n] vectors divided by their lengths; zero stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    found: Float64Array = vectors / np.where(lengths > _EPSILON, lengths, 1)
    return found


def kmeans(points: Float64Array, count: int, seed: int) -> tuple[Int64Array, float]:
    """Divide points into clusters, none of them empty: the best of several restarts.

    Args:
        points: [n, d], n at least 1.
        count: how many clusters at most: there are no more than different points.
        seed: of the first centres, which are drawn with k-means++ (Arthur and Vassilvitskii, 2007).

    Returns:
        [n] int64, each point's cluster, from 0 on; and the sum of squared distances from their
        clusters' means.
    """
    count = min(count, len(np.unique(points, axis=0)))
    generator = np.random.default_rng(seed)
    found = [_one_kmeans(points, count, generator) for _ in range(_RESTARTS)]
    labels, inertia = min(found, key=lambda each: each[1])
    # Clusters are numbered in order of their first points.
    _, first = np.unique(labels, return_index=True)
    order = np.argsort(np.argsort(first))
    return order[labels], inertia


def _one_kmeans(
    points: Float64Array, count: int, generator: np.random.Generator
) -> tuple[Int64Array, float]:
    centres = points[generator.integers(len(points))][None]
    while len(centres) < count:
        distances = _distances(points, centres).min(axis=1)
        total = distances.sum()  # 0 where points differ by less than is computed
        drawn = generator.choice(len(points), p=distances / total if total > 0 else None)
        centres = np.concatenate((centres, points[drawn][None]))
    labels = np.full(len(points), -1)
    for _ in range(_ITERATIONS):
        distances = _distances(points, centres)
        before, labels = labels, distances.argmin(axis=1)
        for empty in np.setdiff1d(np.arange(count), labels):
            # It takes the point that is farthest from its centre, of those not alone in theirs.
            own = np.take_along_axis(distances, labels[:, None], axis=1)[:, 0]
            alone = np.bincount(labels, minlength=count)[labels] == 1
            labels[np.argmax(np.where(alone, -1.0, own))] = empty
        if np.array_equal(before, labels):
            break
        centres = np.stack([points[labels == number].mean(axis=0) for number in range(count)])
    inertia = float(np.square(points - centres[labels]).sum())
    return labels, inertia


def _distances(points: Float64Array, centres: Float64Array) -> Float64Array:
    """Return squared distances: [points, centres]; at least 0."""
    products = points @ centres.T
    squares = np.square(points).sum(axis=1)[:, None] + np.square(centres).sum(axis=1)
    found: Float64Array = np.maximum(squares - 2 * products, 0)
    return found
