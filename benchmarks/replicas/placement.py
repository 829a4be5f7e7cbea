"""Where documents go among simulated replicas: ``midfill.engine.routing`` with a faster hash."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from midfill.engine.routing import DEFAULT_SLOTS

_SHARE = 1.25  # see midfill.engine.routing
_CHOICES = 16  # of a document that are ranked; then the least loaded replica takes the request
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Placement:
    """Which replicas suit a document: rendezvous hashing over those that are there.

    Args:
        replicas: their numbers.
    """

    def __init__(self, replicas: Sequence[int]) -> None:
        self.replicas = np.array(sorted(replicas), np.int64)
        self._keys = _mixed(self.replicas.astype(np.uint64))
        self._ranked: dict[int, list[int]] = {}

    def ranked(self, document: int) -> list[int]:
        """Return the replicas that suit a document best, in order."""
        found = self._ranked.get(document)
        if found is None:
            key = _mixed(np.array([document], np.uint64))[0]
            scores = _mixed(self._keys ^ key)
            count = min(_CHOICES, len(scores))
            best = np.argpartition(scores, len(scores) - count)[len(scores) - count :]
            found = self.replicas[best[np.argsort(scores[best])[::-1]]].tolist()
            self._ranked[document] = found
        return found

    def homes(self, documents: int) -> npt.NDArray[np.int64]:
        """Return the first choice of each of the documents 0, 1, ..."""
        return np.array([self.ranked(document)[0] for document in range(documents)], np.int64)


def moved(before: Sequence[int], after: Sequence[int], documents: int) -> float:
    """Return the share of documents whose first choice changes with the replicas."""
    return float(np.mean(Placement(before).homes(documents) != Placement(after).homes(documents)))


def first_fit(ranked: Sequence[int], running: Sequence[int], slots: int = DEFAULT_SLOTS) -> int:
    """Return the first replica that is not overloaded, as ``engine.routing.choose`` does.

    Args:
        ranked: replicas in order of preference.
        running: requests in progress at every replica.
        slots: up to as many are no overload.
    """
    if running[ranked[0]] < slots:
        return ranked[0]
    bound = math.ceil(_SHARE * (sum(running) + 1) / len(running))
    for replica in ranked:
        if running[replica] < max(slots, bound):
            return replica
    if len(ranked) < len(running):
        return min(range(len(running)), key=running.__getitem__)
    return min(ranked, key=running.__getitem__)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return well-mixed 64-bit numbers (the finaliser of SplitMix64; Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        mixed = values + _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
        return mixed ^ (mixed >> np.uint64(31))
