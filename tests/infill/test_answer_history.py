"""The last answers predict the next one where their beginning was typed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.infill.answer_history import GivenAnswer, predicted_answer

LONG = "".join(random.Random(0).choices("abc \n", k=1000))
END = 7


def rest(answers: list[GivenAnswer], prefix: str) -> tuple[str, int | None] | None:
    found = predicted_answer(answers, prefix)
    return None if found is None else (found.text, found.end_token)


@pytest.mark.parametrize("prefix", ["", "def ", LONG])
def test_what_was_typed_of_an_answer_leaves_the_rest_of_it(prefix: str) -> None:
    given = [GivenAnswer.at(prefix, "area(r):\n", END)]
    assert rest(given, prefix) == ("area(r):\n", END)
    assert rest(given, prefix + "area(") == ("r):\n", END)
    assert rest(given, prefix + "area(r):\n") is None
    assert rest(given, prefix + "area(x") is None


@pytest.mark.parametrize("prefix", ["def ", LONG])
def test_a_caret_elsewhere_has_nothing_to_do_with_it(prefix: str) -> None:
    given = [GivenAnswer.at(prefix, "area(r):\n")]
    assert rest(given, prefix[:-1]) is None
    assert rest(given, "other " + LONG[::-1]) is None
    assert rest(given, "") is None


def test_a_window_that_begins_later_is_the_same_text() -> None:
    given = [GivenAnswer.at(LONG, "area(r)")]
    assert rest(given, LONG[300:] + "ar") == ("ea(r)", None)


def test_who_deletes_what_they_typed_comes_back_to_the_earlier_answer() -> None:
    first, second = GivenAnswer.at(LONG, "area", END), GivenAnswer.at(LONG + "x", "yz", END)
    assert rest([second, first], LONG + "x") == ("yz", END)
    assert rest([second, first], LONG) == ("area", END)


def test_of_an_answer_that_was_broken_off_an_earlier_one_may_know_more() -> None:
    whole, begun = GivenAnswer.at(LONG, "area(r)", END), GivenAnswer.at(LONG + "a", "re")
    assert rest([begun, whole], LONG + "ar") == ("ea(r)", END)
    other = GivenAnswer.at(LONG + "a", "rray")
    assert rest([other, whole], LONG + "ar") == ("ray", None)
    ended = GivenAnswer.at(LONG + "a", "re", END)
    assert rest([ended, whole], LONG + "ar") == ("e", END)


def test_long_answers_are_kept_in_part_and_end_nowhere() -> None:
    answer = GivenAnswer.at("x = ", "1 + " * 5000, END)
    assert len(answer.text) <= 1000
    assert answer.end_token is None


@given(st.text("ab", max_size=400), st.text("ab", min_size=1, max_size=30), st.data())
def test_what_is_predicted_always_completes_the_answer(
    prefix: str, text: str, data: st.DataObject
) -> None:
    typed = data.draw(st.text("ab", max_size=30))
    found = predicted_answer([GivenAnswer.at(prefix, text)], prefix + typed)
    if text.startswith(typed) and text != typed and len(prefix) <= 200:
        assert found is not None
        assert typed + found.text == text
    elif found is not None:  # the text before the caret occurs more than once
        assert text.endswith(found.text)
