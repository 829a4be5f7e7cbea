"""Runs of a prompt's tokens that also stand elsewhere in cached text, where their KV is.

A prompt whose caret has moved is made of text that was computed before, at other positions. The
policy here is pure: it says which tokens could take over whose KV, and changes nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from midfill.arrays import Int32Array, Int64Array

_SEPARATOR = -1
_MAX_PLACES = 256  # so that a text of one token, repeated, takes no time
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a token is lost
_SEED = np.uint64(0x2545F4914F6CDD1D)


class TokenRun(NamedTuple):
    """Consecutive tokens of a prompt that stand in the same order in a cached text.

    Attributes:
        start: number of the run's first token in the prompt.
        length: tokens.
        source: number of the text.
        source_start: number of the run's first token there.
    """

    start: int
    length: int
    source: int
    source_start: int

    @property
    def end(self) -> int:
        """Number of the first token after the run."""
        return self.start + self.length

    @property
    def shift(self) -> int:
        """By how many positions the run has moved."""
        return self.start - self.source_start


def find_runs(
    tokens: Int32Array, start: int, sources: Sequence[Int32Array], min_length: int
) -> list[TokenRun]:
    """Return runs of [n] int32 ``tokens`` that stand in one of ``sources``, in order.

    From ``start`` on, the longest run that begins at a token is taken; among equally long ones the
    first source's, and in it the first. (Of more places than 256, the first 256 are tried.) The
    search goes on after it, or at the next token if no source has as many as ``min_length``. Runs
    don't overlap. A text's first token is never part of a run: models attend to it from everywhere,
    and its KV suits no other place.

    Args:
        tokens: a prompt.
        start: the first token to find.
        sources: int32 arrays, ids of 0 and more.
        min_length: of a run; at least 1.
    """
    texts = [each for source in sources for each in (source[1:], [_SEPARATOR])]
    if not texts or min_length < 1:
        return []
    text = np.concatenate(texts).astype(np.int32)
    firsts = np.cumsum([0, *(max(len(source) - 1, 0) + 1 for source in sources)])
    index = _Index(text, min_length)
    wanted = _fingerprints(tokens, min_length)
    has_match = index.holds(wanted)
    runs = []
    at = max(start, 1)
    while at < len(wanted):
        if not has_match[at]:
            ahead = np.flatnonzero(has_match[at:])
            if not len(ahead):
                break
            at += int(ahead[0])
        place, length = _longest(tokens[at:], text, index.places(wanted[at]))
        if length < min_length:
            at += 1
            continue
        source = int(np.searchsorted(firsts, place, side="right")) - 1
        runs.append(TokenRun(at, length, source, place - int(firsts[source]) + 1))
        at += length
    return runs


class _Index:
    """Where each window of ``size`` tokens stands in a text, by fingerprint."""

    def __init__(self, text: Int32Array, size: int) -> None:
        fingerprints = _fingerprints(text, size)
        self._order = np.argsort(fingerprints, kind="stable")
        self._sorted = fingerprints[self._order]

    def holds(self, wanted: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return whether each fingerprint occurs: [n] bool."""
        if not len(self._sorted):
            return np.zeros(len(wanted), bool)
        found = np.searchsorted(self._sorted, wanted)
        holds: NDArray[np.bool_] = self._sorted[np.minimum(found, len(self._sorted) - 1)] == wanted
        return holds

    def places(self, wanted: np.uint64) -> Int64Array:
        """Return the first places of a fingerprint's windows, ascending."""
        first = np.searchsorted(self._sorted, wanted, side="left")
        end = np.searchsorted(self._sorted, wanted, side="right")
        return self._order[first : min(end, first + _MAX_PLACES)]


def _fingerprints(tokens: Int32Array, size: int) -> NDArray[np.uint64]:
    """Return a number per window of ``size`` tokens: [n - size + 1] uint64, for n of at least size.

    Equal windows have equal numbers. Others may collide, so whoever finds one compares the tokens.
    """
    count = max(len(tokens) - size + 1, 0)
    numbers = (tokens.astype(np.int64).astype(np.uint64) + _SEED) * _FACTOR
    numbers ^= numbers >> np.uint64(29)
    sums = np.zeros(count, np.uint64)
    for place in range(size):
        sums = sums * _FACTOR + numbers[place : place + count]
    return sums


def _longest(tokens: Int32Array, text: Int32Array, places: Int64Array) -> tuple[int, int]:
    """Return the first of ``places`` where most of ``tokens`` stand in ``text``, and how many.

    ``text`` ends with a separator, which equals no token, so no place goes beyond its end.
    """
    length = 0
    while len(places) > 1 and length < len(tokens):
        going_on = places[text[places + length] == tokens[length]]
        if not len(going_on):
            break
        places = going_on
        length += 1
    place = int(places[0])
    if len(places) > 1:
        return place, length
    span = min(len(tokens), len(text) - place)
    differs = np.flatnonzero(text[place : place + span] != tokens[:span])
    return place, int(differs[0]) if len(differs) else span
