"""Metrics: how close an answer is to the text that stood in the hole."""

import re

from midfill.infill.trim import first_line

_WORD = re.compile(r"\w*")


def is_exact(answer: str, hole: str) -> bool:
    """Whether an answer is the hole's text, white space at the end of both aside."""
    return answer.rstrip() == hole.rstrip()


def is_exact_first_line(answer: str, hole: str) -> bool:
    """``is_exact`` of the answer up to its first line break."""
    return is_exact(first_line(answer), hole)


def similarity(answer: str, hole: str) -> float:
    """Edit similarity: 1 - Levenshtein distance / the longer length; white space at the ends aside.

    1 for equal texts, 0 for texts that share nothing.
    """
    answer, hole = answer.rstrip(), hole.rstrip()
    longer = max(len(answer), len(hole))
    return 1.0 - levenshtein(answer, hole) / longer if longer else 1.0


def completes_word(answer: str, rest: str) -> bool:
    """Whether an answer first writes the rest of the word the caret stands in, and nothing else.

    Args:
        answer: what comes after the caret.
        rest: the word's letters, digits and underscores after the caret.
    """
    match = _WORD.match(answer)
    return match is not None and match[0] == rest


def levenshtein(a: str, b: str) -> int:
    """Fewest insertions, deletions and replacements of characters that make ``b`` of ``a``.

    Myers' bit-parallel algorithm (1999) as Hyyrö (2003) writes it for edit distance. A column of
    the table is kept as the differences between neighbours, one bit a row; Python's integers are
    as long as the column, so a column costs a dozen operations.
    """
    if not a:
        return len(b)
    places: dict[str, int] = {}
    for place, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << place
    column = (1 << len(a)) - 1
    last = 1 << len(a) - 1
    up, down, distance = column, 0, len(a)  # rows that are one more, one less than the row above
    for character in b:
        same = places.get(character, 0)
        diagonal = (((same & up) + up) ^ up) | same | down
        rightward_up = down | ~(diagonal | up) & column
        rightward_down = up & diagonal
        distance += bool(rightward_up & last) - bool(rightward_down & last)
        rightward_up = (rightward_up << 1 | 1) & column
        rightward_down = rightward_down << 1 & column
        up = rightward_down | ~(diagonal | rightward_up) & column
        down = rightward_up & diagonal
    return distance
