"""Drafts: guesses at the next tokens, copied from the text, and how often they are right.

Completions copy from the document: names, calls, whole lines. Prompt lookup decoding (Saxena, 2023)
looks for earlier occurrences of the last tokens and drafts what followed there. Of all occurrences
those with the longest match count, as in SAM-Decoding (Hu et al., 2024).

There is no index. A pass over the tokens takes some microseconds; attention reads ten thousand
times as many bytes per step. So nothing has to be built, updated and freed, as a suffix automaton
would, and the cost grows no faster than a step's.

``AcceptanceRates`` are kept by kind of evidence: how long the match is, and whether all places
agree.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from midfill.arrays import Int32Array

# Longer matches are not distinguished: at this length nearly every draft is right.
MAX_MATCH_LENGTH = 16

# How many places have their continuations compared: the latest ones.
_MAX_PLACES = 16
CERTAIN = 0
"""Evidence: no other token is possible."""

SPELLED = 1
"""Evidence: a likely way to spell the bytes that the answer has to begin with."""

PREDICTED = 2
"""Evidence: what the request says the answer will probably be."""
_FIRST_MATCH = 3

# Of the places with a match of one length: continuations differ, there is one place, all agree.
_DISPUTED, _SINGLE, _UNANIMOUS = range(3)
_LENGTHS = (1, 2, 3, 4, 6, 10)

_LENGTH_CLASS = tuple(
    sum(length >= start for start in _LENGTHS) - 1 for length in range(MAX_MATCH_LENGTH + 1)
)

EVIDENCE_KINDS = _FIRST_MATCH + 3 * len(_LENGTHS)
"""Number of kinds of evidence."""

# The weight of earlier observations is multiplied by this at each new one.
_DECAY = 0.98
_PRIOR_WEIGHT = 10.0


class Draft(NamedTuple):
    """Proposed next tokens.

    Attributes:
        tokens: [n] int32; not to be changed.
        evidence: [n] kind of evidence for each token, provided that the ones before are right.
    """

    tokens: Int32Array
    evidence: tuple[int, ...]


NO_DRAFT = Draft(np.empty(0, dtype=np.int32), ())


def match_evidence(length: int, places: int, agree: bool) -> int:
    """Return the kind of evidence for a token found by lookup.

    Args:
        length: number of tokens that match before it; at least 1.
        places: number of places with such a match.
        agree: whether all of them continue with this token.
    """
    kind = _SINGLE if places == 1 else _UNANIMOUS if agree else _DISPUTED
    return _FIRST_MATCH + 3 * _LENGTH_CLASS[min(length, MAX_MATCH_LENGTH)] + kind


def longest_match(tokens: Int32Array) -> tuple[Int32Array, int]:
    """Find where the end of a sequence occurred before.

    Args:
        tokens: [n] int32.

    Returns:
        (places, length): [m] int32 indices below n, ascending. Before each, and before n, stand
        the same ``length`` tokens. ``length`` is the greatest possible, at most MAX_MATCH_LENGTH.
        Without an earlier occurrence of the last token: no places, length 0.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:-1] == tokens[last])
    if not len(ends):
        return ends.astype(np.int32), 0
    length = 1
    while length < MAX_MATCH_LENGTH:
        longer = ends if ends[0] >= length else ends[1:]  # the first one is at the beginning
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    return (ends + 1).astype(np.int32), length


def prompt_lookup(tokens: Int32Array, count: int) -> Draft:
    """Draft what followed the latest place with the longest match.

    Args:
        tokens: [n] int32, prompt and answer so far.
        count: length of the draft, if any place is found.
    """
    if count < 1 or len(tokens) < 2:
        return NO_DRAFT
    places, length = longest_match(tokens)
    if not length:
        return NO_DRAFT
    latest = int(places[-1])
    # Like an overlapping copy, a draft that reaches the end of the sequence continues with itself.
    found = np.resize(tokens[latest : latest + count], count)
    if len(places) == 1:
        return Draft(found, tuple(match_evidence(length + i, 1, True) for i in range(count)))
    text = np.concatenate((tokens, found[len(tokens) - latest :]))
    # [places, count]: what follows each place.
    continuations = text[places[-_MAX_PLACES:, None] + np.arange(count, dtype=np.int32)]
    agreeing = np.logical_and.accumulate(continuations == found, axis=1).sum(0).tolist()
    evidence = []
    candidates = len(continuations)
    for offset, agree in enumerate(agreeing):
        evidence.append(match_evidence(length + offset, candidates, agree == candidates))
        candidates = agree
    return Draft(found, tuple(evidence))


# Initial rates, measured on greedy completions of Python files by a small model.
_PRIORS = {
    CERTAIN: 1.0,
    SPELLED: 0.4,
    PREDICTED: 0.85,
    **{
        match_evidence(length, places, agree): rate
        for (places, agree), rates in {
            (2, False): (0.25, 0.25, 0.25, 0.3, 0.3, 0.4),
            (1, True): (0.27, 0.6, 0.67, 0.78, 0.8, 0.9),
            (2, True): (0.6, 0.8, 0.88, 0.95, 0.96, 0.97),
        }.items()
        for length, rate in zip((1, 2, 3, 4, 6, 10), rates, strict=True)
    },
}

# Nothing but certain tokens is estimated to be likelier.
_MAX_RATE = 0.98


class AcceptanceRates:
    """Exponentially weighted acceptance rates over all sequences of an engine."""

    def __init__(self) -> None:
        priors = [_PRIORS[kind] for kind in range(EVIDENCE_KINDS)]
        self._right = [rate * _PRIOR_WEIGHT for rate in priors]
        self._seen = [_PRIOR_WEIGHT] * EVIDENCE_KINDS

    def rate(self, evidence: int) -> float:
        """Return the estimated probability that a token with this kind of evidence is right."""
        return self._right[evidence] / self._seen[evidence]

    def observe(self, evidence: int, right: bool) -> None:
        """Record whether a token with this kind of evidence was right."""
        self._right[evidence] = self._right[evidence] * _DECAY + right
        self._seen[evidence] = self._seen[evidence] * _DECAY + 1.0

    def acceptance_probabilities(
        self, evidence: SequenceOf[int], calibration: float
    ) -> tuple[float, ...]:
        """Return the probabilities that the first, first two, ... tokens of a draft are all right.

        Args:
            evidence: the kind of evidence for each token.
            calibration: the sequence's ``Calibration.factor``.
        """
        probabilities = []
        probability = 1.0
        for kind in evidence:
            if kind != CERTAIN:
                probability *= min(self.rate(kind) * calibration, _MAX_RATE)
            probabilities.append(probability)
        return tuple(probabilities)


class Calibration:
    """How often drafts are right in one sequence, relative to the estimates.

    Some answers copy from their document and others don't; a few tokens show which.
    """

    __slots__ = ("_expected", "_right")

    _DECAY = 0.95
    _PRIOR_WEIGHT = 8.0

    def __init__(self) -> None:
        self._right = 0.0
        self._expected = 0.0

    @property
    def factor(self) -> float:
        """Right tokens per expected right token; 1 at the start."""
        return (self._right + self._PRIOR_WEIGHT) / (self._expected + self._PRIOR_WEIGHT)

    def observe(self, rate: float, right: bool) -> None:
        """Record whether a drafted token was right, given its estimated probability ``rate``."""
        self._right = self._right * self._DECAY + right
        self._expected = self._expected * self._DECAY + rate
