"""Drafts: guesses at a sequence's next tokens, copied from its own text.

Completions copy from the document: names, calls, whole lines. Prompt lookup decoding (Saxena, 2023)
looks for earlier occurrences of the last tokens and drafts what followed there. Of all occurrences
those with the longest common context count, as in SAM-Decoding (Hu et al., 2024).

There is no index. A pass over the tokens takes some microseconds; attention reads ten thousand
times as many bytes per step. So nothing has to be built, updated and freed, as a suffix automaton
would, and the cost grows no faster than a step's.
"""

from typing import NamedTuple

import numpy as np

from midfill.arrays import Int32Array

# Longer contexts are not distinguished: at this length nearly every draft is right.
MAX_MATCH_LENGTH = 16
# How many places have their continuations compared: the latest ones.
_MAX_PLACES = 16

CERTAIN = 0
"""Evidence: no other token is possible."""
SPELLED = 1
"""Evidence: a likely way to spell the bytes that the answer has to begin with."""
_FIRST_MATCH = 2
# Of the places with the same context: continuations differ, there is one place, all agree.
_DISPUTED, _SINGLE, _UNANIMOUS = range(3)
_LENGTHS = (1, 2, 3, 4, 6, 10)
_LENGTH_CLASS = tuple(
    sum(length >= start for start in _LENGTHS) - 1 for length in range(MAX_MATCH_LENGTH + 1)
)
EVIDENCE_KINDS = _FIRST_MATCH + 3 * len(_LENGTHS)
"""Number of kinds of evidence."""


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
        length: length of the common context; at least 1.
        places: number of places with that context.
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
    """Draft what followed the latest place with the longest context.

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
