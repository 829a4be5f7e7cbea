"""Episodes of a conversation: clusters of windows, by the mean embedding of their tokens.

Numbers only, no state. An embedding is the mean of the model's own input embeddings of a text's
tokens, less the mean over the whole history, and of length 1. What all windows have in common, such
as punctuation and speakers' names, would otherwise hide what tells them apart.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array

_RESTARTS, _ITERATIONS = 10, 100
_EPSILON = 1e-12


@dataclass(frozen=True, eq=False)
class Episodes:
    """The topics of one conversation.

    Attributes:
        centroids: float64 [episodes, hidden], of length 1.
        common: float64 [hidden], the mean over the history, which embeddings are taken from.
        representatives: of each episode, numbers of the windows nearest to its centroid, nearest
            first.
        labels: [windows] int64, the episode of each window.
    """

    centroids: Float64Array
    common: Float64Array
    representatives: tuple[Int64Array, ...]
    labels: Int64Array

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        arrays = (self.centroids, self.common, self.labels, *self.representatives)
        return sum(array.nbytes for array in arrays)

    def nearest(self, mean: Float64Array) -> int:
        """Return the episode that a text is nearest to; of equally near ones the first.

        Args:
            mean: [hidden], of its tokens' embeddings.
        """
        return int(np.argmax(self.centroids @ unit(mean - self.common)))


def find_episodes(
    tokens: Int32Array, bounds: Int32Array, table: Float32Array, count: int, near: int, seed: int
) -> Episodes:
    """Divide a conversation into episodes.

    Args:
        tokens: [n] int32, the history, as rows of ``table``.
        bounds: [windows + 1] int32, where windows begin, and where the last one ends; one at least.
        table: float32 [different tokens, hidden], embeddings.
        count: how many episodes; fewer where there are fewer different windows.
        near: how many windows at most represent an episode.
        seed: of the random choices.
    """
    means = np.stack([
        mean_embedding(tokens[start:end], table)
        for start, end in pairwise(bounds)
    ])  # fmt: skip
    common = np.average(means, axis=0, weights=np.diff(bounds))
    points = unit(means - common)
    labels, _ = kmeans(points, count, seed)
    centroids = unit(np.stack([points[labels == e].mean(axis=0) for e in range(labels.max() + 1)]))
    representatives = tuple(
        members[np.argsort(-(points[members] @ centroid), kind="stable")][:near]
        for episode, centroid in enumerate(centroids)
        for members in [np.flatnonzero(labels == episode)]
    )
    return Episodes(centroids, common, representatives, labels)


def mean_embedding(tokens: Int32Array, table: Float32Array) -> Float64Array:
    """Return the mean embedding of tokens, which are rows of a table: [hidden]."""
    mean: Float64Array = table[tokens].mean(axis=0, dtype=np.float64)
    return mean


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
