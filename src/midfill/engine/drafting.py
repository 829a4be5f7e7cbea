"""Drafts: guesses at a sequence's next tokens, copied from what stands in it already.

Completions copy from the document: names, calls, whole lines. Prompt lookup decoding (Saxena, 2023)
looks for the place where the last tokens occurred before and drafts what followed there; of all
such places the ones with the longest common context count, as in SAM-Decoding (Hu et al., 2024).

There is no index. A pass over the tokens takes some microseconds, and before each token the model's
own attention reads ten thousand times as many bytes about them. So nothing has to be built, kept
up to date or given back, as a suffix automaton would, and it grows no faster than a step does.
"""

from typing import NamedTuple

import numpy as np

from midfill.forward.batch import Int32Array

# Longer contexts are not told apart: at this length nearly every draft is right.
LONGEST_MATCH = 16
# Places whose continuations are compared; the latest count.
_MOST_PLACES = 16

CERTAIN = 0
"""Evidence: nothing else can come."""
SPELLED = 1
"""Evidence: a way to write the bytes that the answer has to begin with."""
_FIRST_MATCH = 2
# Places with the same context: they go on differently, there is one, or they all agree.
_DISPUTED, _SINGLE, _UNANIMOUS = range(3)
_LENGTHS = (1, 2, 3, 4, 6, 10)
_LENGTH_CLASS = tuple(
    sum(length >= start for start in _LENGTHS) - 1 for length in range(LONGEST_MATCH + 1)
)
EVIDENCE_KINDS = _FIRST_MATCH + 3 * len(_LENGTHS)
"""Kinds of evidence are numbered below it."""


class Draft(NamedTuple):
    """Guessed tokens and what speaks for them.

    Attributes:
        tokens: [n] int32.
        evidence: [n] kinds of evidence, each for one token if the ones before are right.
    """

    tokens: Int32Array
    evidence: tuple[int, ...]


NO_DRAFT = Draft(np.empty(0, dtype=np.int32), ())


def match_evidence(length: int, places: int, agree: bool) -> int:
    """What speaks for a token that was found.

    Args:
        length: of the common context, from 1.
        places: how many there are with that context.
        agree: whether all of them go on with this token.
    """
    kind = _SINGLE if places == 1 else _UNANIMOUS if agree else _DISPUTED
    return _FIRST_MATCH + 3 * _LENGTH_CLASS[min(length, LONGEST_MATCH)] + kind


def longest_match(tokens: Int32Array) -> tuple[Int32Array, int]:
    """Where the end of a sequence occurred before.

    Args:
        tokens: [n] int32.

    Returns:
        (places, length): [m] places in ``tokens``, ascending, none of them n, before which stand
        the same ``length`` tokens as at the end; ``length`` is the greatest possible, but at most
        LONGEST_MATCH. No places and 0 where the last token is new.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:-1] == tokens[last])
    if not len(ends):
        return ends.astype(np.int32), 0
    length = 1
    while length < LONGEST_MATCH:
        longer = ends if ends[0] >= length else ends[1:]  # the first one is at the beginning
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    return (ends + 1).astype(np.int32), length


def prompt_lookup(tokens: Int32Array, most: int) -> Draft:
    """Draft what followed the latest place with the longest context.

    Args:
        tokens: [n] int32, prompt and answer so far.
        most: length of the draft, if there is one.
    """
    if most < 1 or len(tokens) < 2:
        return NO_DRAFT
    places, length = longest_match(tokens)
    if not length:
        return NO_DRAFT
    latest = int(places[-1])
    # Like an overlapping copy, a draft that reaches the sequence's end goes on from itself.
    found = np.resize(tokens[latest : latest + most], most)
    if len(places) == 1:
        return Draft(found, tuple(match_evidence(length + i, 1, True) for i in range(most)))
    text = np.concatenate((tokens, found[len(tokens) - latest :]))
    # Row i: what follows the i-th place.
    seen = text[places[-_MOST_PLACES:, None] + np.arange(most, dtype=np.int32)]
    agreeing = np.logical_and.accumulate(seen == found, axis=1).sum(0).tolist()
    evidence = []
    rivals = len(seen)
    for offset, still in enumerate(agreeing):
        evidence.append(match_evidence(length + offset, rivals, still == rivals))
        rivals = still
    return Draft(found, tuple(evidence))
