"""SCBench's metrics beside naive references and cases worked out by hand."""

import itertools
import random
from collections.abc import Sequence

import pytest

from midfill_lab.bench.scbench.scoring import common_places, rouge_lsum, score_answer


def naive_longest(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of a longest common subsequence by trying all of them."""

    def is_within(part: Sequence[str], whole: Sequence[str]) -> bool:
        rest = iter(whole)
        return all(word in rest for word in part)

    return max(
        size
        for size in range(len(first) + 1)
        for part in itertools.combinations(first, size)
        if is_within(part, second)
    )


def test_common_subsequences_are_the_longest() -> None:
    rng = random.Random(0)
    for _ in range(200):
        first, second = ("".join(rng.choices("abc", k=rng.randrange(9))) for _ in range(2))
        places = sorted(common_places(first, second))
        assert len(places) == naive_longest(first, second)
        rest = iter(second)
        assert all(first[place] in rest for place in places), "what is chosen is a subsequence"


def test_rouge_of_one_line_is_the_f_measure_of_its_longest_common_subsequence() -> None:
    rng = random.Random(1)
    for _ in range(50):
        found, expected = (rng.choices("abcd", k=rng.randrange(1, 8)) for _ in range(2))
        longest = naive_longest(expected, found)
        value = 2 * longest / (len(found) + len(expected))
        assert rouge_lsum(" ".join(found), [" ".join(expected)]) == pytest.approx(value)


def test_rouge_of_several_lines_unites_what_they_share() -> None:
    # Lin (2004), section 3.2: "w1 w2 w3 w4 w5" beside "w1 w2 w6 w7 w8" and "w1 w3 w8 w9 w5" shares
    # w1, w2, w3 and w5: recall 4/5, precision 4/10.
    value = rouge_lsum("w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", ["w1 w2 w3 w4 w5"])
    assert value == pytest.approx(2 * 0.8 * 0.4 / (0.8 + 0.4))
    assert rouge_lsum("A word, a word.", ["a word"]) == pytest.approx(2 / 3)
    assert rouge_lsum("word", ["word\nword"]) == pytest.approx(2 / 3), "no word counts twice"
    assert rouge_lsum("other", ["word", "other"]) == 1.0, "the best of several"


CASES = [
    ("substring", '4821", "next', ["4821"], 1.0),
    ("substring", "the 482 1", ["4821"], 0.0),
    ("share", " amber_fox, keen_owl and other", ["amber_fox", "keen_owl", "calm_elm"], 2 / 3),
    ("share", " amber_foxes", ["amber_fox"], 0.0),
    ("characters", "北京市", ["北京"], 0.8),
    ("characters", "京北!", ["北京"], 1.0),
    ("characters", "上海", ["北京"], 0.0),
    ("choice", "The answer is B.", ["B"], 1.0),
    ("choice", "B", ["B"], 1.0),
    ("choice", " (C) rather than B", ["B"], 0.0),
    ("choice", "Because", ["B"], 0.0),
    ("number", " is 3.50, not 4", ["3.5"], 1.0),
    ("number", "-12", ["12"], 0.0),
    ("number", "12 apples", ["12"], 1.0),
    ("number", "none", ["12"], 0.0),
    ("label", " dax.", ["dax"], 1.0),
    ("label", " wug dax", ["dax"], 0.0),
]


@pytest.mark.parametrize(("metric", "answer", "accepted", "score"), CASES)
def test_metrics(metric: str, answer: str, accepted: list[str], score: float) -> None:
    assert score_answer(metric, answer, accepted) == pytest.approx(score)  # type: ignore[arg-type]


def test_a_function_counts_that_is_nearly_the_right_one_and_no_other() -> None:
    code = "def area(width, height):\n    return width * height"
    near = code.replace("width * height", "width + height")
    assert score_answer("function", code.replace("height", "heigth", 1), [code]) == 1.0
    assert score_answer("function", code, [code], [near]) == 1.0
    assert score_answer("function", near.replace("area", "are"), [code], [near]) == 0.0
    assert score_answer("function", code[: len(code) // 2], [code]) == 0.0
