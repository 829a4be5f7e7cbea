"""SCBench's metrics: how right an answer is, from 0 to 1.

Source: Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods", ICLR 2025,
arXiv 2412.10319; ROUGE: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from midfill_lab.evaluation.metrics import similarity

Metric = Literal[
    "substring", "share", "characters", "choice", "number", "label", "function", "rouge"
]

PASSING_SIMILARITY = 0.8
"""Edit similarity from which on a function counts as reproduced (RepoQA's threshold)."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_CHOICE = re.compile(r"(?:^|[^A-Za-z'])([A-D])(?![A-Za-z'])")
_WORD = re.compile(r"[a-z0-9]+")


def score_answer(
    metric: Metric, answer: str, accepted: Sequence[str], others: Sequence[str] = ()
) -> float:
    """Return an answer's score.

    Args:
        metric: how it is compared.
        answer: what was generated.
        accepted: right answers; for ``share``, the names of which each counts.
        others: wrong ones that the answer must not be closer to; for ``function``.
    """
    if metric == "function":
        return reproduces(answer, accepted[0], others)
    return _METRICS[metric](answer, accepted)


def contains_any(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if one of the right answers stands in it."""
    return float(any(one in answer for one in accepted))


def share_found(answer: str, accepted: Sequence[str]) -> float:
    """Return the share of some names that stand in an answer as whole words."""
    words = set(re.findall(r"\w+", answer))
    return sum(name in words for name in accepted) / len(accepted)


def character_f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the best F1 of an answer's characters against a right one's, in any order.

    White space and punctuation don't count.
    """
    return max(_f1(_letters(answer), _letters(one)) for one in accepted)


def first_choice(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the first letter from A to D that stands alone is the right one."""
    found = _CHOICE.search(answer)
    return float(found is not None and found[1] in accepted)


def first_number(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the first number of an answer equals a right one, a minus sign included."""
    found = _NUMBER.search(answer)
    return float(found is not None and any(float(found[0]) == float(one) for one in accepted))


def first_word(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the first word of an answer is a right one."""
    words = answer.split()
    return float(bool(words) and words[0].strip(".,;:") in accepted)


def reproduces(answer: str, code: str, others: Sequence[str]) -> float:
    """Return 1 if an answer is a function up to a few characters, and no other one is closer."""
    own = similarity(answer.strip(), code)
    if own < PASSING_SIMILARITY:
        return 0.0
    return float(all(similarity(answer.strip(), other) <= own for other in others))


def rouge_lsum(answer: str, accepted: Sequence[str]) -> float:
    """Return ROUGE-L at summary level, its F-measure: lines are sentences; the best of several.

    For each line of the right summary, the words that belong to a longest common subsequence with
    any of the answer's lines are found; a word counts at most as often as in the answer. Words are
    runs of letters and digits in lower case, without stemming.
    """
    return max(_rouge_lsum(answer, one) for one in accepted)


def common_places(first: Sequence[str], second: Sequence[str]) -> set[int]:
    """Return the places in ``first`` of one longest common subsequence of two sequences."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first):
        for j, other in enumerate(second):
            lengths[i + 1][j + 1] = (
                lengths[i][j] + 1 if word == other else max(lengths[i][j + 1], lengths[i + 1][j])
            )
    places: set[int] = set()
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            places.add(i - 1)
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] >= lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return places


def _rouge_lsum(answer: str, summary: str) -> float:
    expected, found = _sentences(summary), _sentences(answer)
    left = Counter(word for sentence in found for word in sentence)
    wanted, written = sum(map(len, expected)), sum(left.values())
    hits = 0
    for sentence in expected:
        places = {place for other in found for place in common_places(sentence, other)}
        for place in sorted(places):
            if left[sentence[place]] > 0:
                left[sentence[place]] -= 1
                hits += 1
    return 2 * hits / (wanted + written) if hits else 0.0


def _sentences(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := _WORD.findall(line.lower()))]


def _letters(text: str) -> Counter[str]:
    return Counter(character for character in text if character.isalnum())


def _f1(found: Counter[str], expected: Counter[str]) -> float:
    common = (found & expected).total()
    return 2 * common / (found.total() + expected.total()) if common else 0.0


_METRICS: Mapping[Metric, Callable[[str, Sequence[str]], float]] = {
    "substring": contains_any,
    "share": share_found,
    "characters": character_f1,
    "choice": first_choice,
    "number": first_number,
    "label": first_word,
    "rouge": rouge_lsum,
}
