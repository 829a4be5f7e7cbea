"""Metrics: how close an answer is to the text that was in the hole."""

import re

from midfill.infill.trim import first_line
from midfill_lab.evaluation.models import Answer
from midfill_lab.evaluation.problems import EMPTY_TASKS, LINE_TASKS, Problem

_WORD = re.compile(r"\w*")


def score_answer(problem: Problem, answer: Answer) -> dict[str, float]:
    """Return the scores of an answer that need no test, each from 0 to 1.

    exact, similarity: of the whole answer.
    exact_first_line: of the answer up to its first line break; for holes within a line.
    subtoken: whether it completes the caret's word; for holes inside words.
    empty: whether it is nothing or blank. Where nothing is missing that is right, and there is no
        other score but stops; a blank hole can't be answered wrongly so.
    stops: whether it ended by itself, and within its line if the hole ends with its line.
    """
    text = answer.text
    stops = float(answer.ended and not _leaves_line(problem, text))
    blank = not text.strip()
    if problem.task in EMPTY_TASKS:
        return {"empty": float(blank), "stops": stops}
    scores = {
        "exact": float(is_exact(text, problem.hole)),
        "similarity": similarity(text, problem.hole),
        "empty": float(blank and bool(problem.hole.strip())),
        "stops": stops,
    }
    if problem.task in LINE_TASKS:
        scores["exact_first_line"] = float(is_exact_first_line(text, problem.hole))
    if problem.task == "subtoken":
        scores["subtoken"] = float(completes_word(text, problem.word_rest))
    return scores


def is_exact(answer: str, hole: str) -> bool:
    """Return whether an answer equals the hole's text, apart from white space at the end."""
    return answer.rstrip() == hole.rstrip()


def is_exact_first_line(answer: str, hole: str) -> bool:
    """Return whether the answer's first line equals the hole's text, see ``is_exact``."""
    return is_exact(first_line(answer), hole)


def first_text_line(text: str) -> str:
    """Return a text up to the end of its first line that has more than white space.

    Blank lines before it belong to it, white space at its end does not.
    """
    start = len(text) - len(text.lstrip())
    return text[:start].replace("\r\n", "\n") + first_line(text[start:]).rstrip()


def similarity(answer: str, hole: str) -> float:
    """Return the edit similarity: 1 - Levenshtein distance / length of the longer text.

    White space at the end of both is ignored. It is 1 for equal texts, 0 for texts that share no
    character.
    """
    answer, hole = answer.rstrip(), hole.rstrip()
    longer = max(len(answer), len(hole))
    return 1.0 - levenshtein(answer, hole) / longer if longer else 1.0


def completes_word(answer: str, rest: str) -> bool:
    """Return whether an answer completes the caret's word, and ends the word there.

    Args:
        answer: the text after the caret.
        rest: the letters, digits and underscores that are missing from the word.
    """
    match = _WORD.match(answer)
    return match is not None and match[0] == rest


def levenshtein(a: str, b: str) -> int:
    """Return the Levenshtein distance of two texts.

    Myers' bit-parallel algorithm (1999) in Hyyrö's form for edit distance (2003). A column of the
    dynamic-programming table is stored as differences between neighbouring rows, one bit per row.
    A Python integer holds a whole column, which costs a dozen operations.
    """
    if not a:
        return len(b)
    places: dict[str, int] = {}
    for place, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << place
    column = (1 << len(a)) - 1
    last = 1 << len(a) - 1
    up, down, distance = column, 0, len(a)  # rows that are greater, less by 1 than the row above
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


def _leaves_line(problem: Problem, text: str) -> bool:
    """Return whether an answer continues after the line that its hole ends with."""
    if problem.task not in LINE_TASKS:
        return False
    return "\n" in (text.removesuffix("\n") if problem.hole.endswith("\n") else text)
