"""Metrics: Levenshtein distance, similarity, exact match and completed words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill_lab.evaluation.metrics import (
    completes_word,
    is_exact,
    is_exact_first_line,
    levenshtein,
    similarity,
)

TEXTS = st.text(alphabet="ab\n é", max_size=90)


def textbook_levenshtein(a: str, b: str) -> int:
    """Compute the table row by row (Wagner and Fischer, 1974)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@given(TEXTS, TEXTS)
@settings(max_examples=300, deadline=None)
def test_levenshtein_is_that_of_the_textbook(a: str, b: str) -> None:
    assert levenshtein(a, b) == textbook_levenshtein(a, b)


def test_levenshtein_of_known_pairs() -> None:
    assert levenshtein("kitten", "sitting") == 3
    assert levenshtein("", "abc") == levenshtein("abc", "") == 3
    assert levenshtein("x" * 1000, "x" * 999 + "y") == 1


def test_similarity_is_1_for_equal_and_0_for_different_texts() -> None:
    assert similarity("", "") == similarity("a = 1", "a = 1  \n") == 1.0
    assert similarity("abc", "xyz") == similarity("", "x") == 0.0
    assert similarity("abcd", "abcx") == 0.75


def test_exact_ignores_white_space_at_the_end_only() -> None:
    assert is_exact("return x\n\n", "return x")
    assert not is_exact(" return x", "return x")
    assert not is_exact("return x\ny", "return x")
    assert is_exact_first_line("return x\ny", "return x")
    assert not is_exact_first_line("\nreturn x", "return x")


@pytest.mark.parametrize(
    ("answer", "right"),
    [("turn x", True), ("turn", True), ("turning", False), ("turn_", False), ("tur n", False)],
)
def test_a_word_is_completed_by_its_rest_only(answer: str, right: bool) -> None:
    assert completes_word(answer, "turn") == right
