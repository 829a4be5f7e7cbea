"""Which other answers are tried, and which one is kept."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from midfill.infill.candidates import (
    PLACES,
    Alternative,
    Alternatives,
    Line,
    behind,
    choose,
)

logprobs = st.floats(-8.0, -0.01)
places = st.lists(
    st.tuples(logprobs, st.none() | st.lists(logprobs, max_size=3)), min_size=1, max_size=6
)


def followed(count: int, *tokens: tuple[float, list[tuple[int, float]] | None]) -> Alternatives:
    alternatives = Alternatives(count)
    for logprob, others in tokens:
        alternatives.push(logprob, others)
    return alternatives


def line(joint: float, *, complete: bool = True, over: bool = False, blank: bool = False) -> Line:
    return Line(joint, complete, over, blank)


def test_an_answer_that_stays_ahead_of_its_alternatives_has_no_branch() -> None:
    assert list(followed(4, (-0.1, [(5, -2.5)]), (-0.2, [(6, -1.9)])).take()) == []


def test_a_branch_begins_once_the_answer_is_less_probable_than_it() -> None:
    alternatives = followed(4, (-0.5, [(5, -1.0)]))
    assert list(alternatives.take()) == []
    alternatives.push(-0.7, [(6, -0.8)])
    assert list(alternatives.take()) == [Alternative(0, 5, -1.0, -1.0)]
    alternatives.push(-0.5, None)
    assert list(alternatives.take()) == [Alternative(1, 6, -0.8, -1.3)]


def test_the_most_probable_alternatives_are_tried_and_no_more_than_asked_for() -> None:
    alternatives = followed(2, (-3.0, [(5, -1.5), (6, -0.5), (7, -1.0)]))
    assert [each.token_id for each in alternatives.take()] == [6, 7]
    assert list(alternatives.take()) == []


def test_what_is_prescribed_and_what_comes_late_has_no_alternatives() -> None:
    tokens = [(-2.0, None), *[(-2.0, [(5, -0.1)])] * PLACES]
    assert [each.place for each in followed(9, *tokens).take()] == [1, 2]


@given(places, st.integers(1, 4))
def test_a_branch_begins_with_more_than_the_answer_has_left(
    tokens: list[tuple[float, list[float] | None]], count: int
) -> None:
    """The same branches begin, in the same order, whether they are taken at once or at the end."""
    at_once, at_the_end, taken = Alternatives(count), Alternatives(count), list[Alternative]()
    joint = 0.0
    for logprob, others in tokens:
        numbered = None if others is None else list(enumerate(others))
        for each in (at_once, at_the_end):
            each.push(logprob, numbered)
        joint += logprob
        new = list(at_once.take())
        assert all(each.joint > joint for each in new)
        taken += new
    assert sorted(taken, key=lambda each: -each.joint) == list(at_the_end.take())


def test_the_most_probable_complete_line_is_kept_and_the_first_of_equals() -> None:
    assert choose([line(-2.0), line(-1.0), line(-1.5)]) == 1
    assert choose([line(-1.0), line(-1.0)]) == 0


def test_nothing_is_chosen_while_a_line_may_still_win() -> None:
    assert choose([line(-2.0), line(-1.0, complete=False)]) is None
    assert choose([line(-2.0), line(-2.5, complete=False)]) == 0
    assert choose([line(-2.0, complete=False)]) is None


@pytest.mark.parametrize("useless", [line(-0.1, blank=True), line(-0.1, complete=False, over=True)])
def test_a_line_without_text_or_an_end_is_kept_only_if_there_is_no_other(useless: Line) -> None:
    assert choose([useless, line(-3.0)]) == 1
    assert choose([line(-3.0), useless]) == 0
    assert choose([useless, useless]) == 0


def test_lines_that_are_less_probable_than_a_complete_one_are_behind() -> None:
    lines = [line(-1.0), line(-1.1, complete=False), line(-0.9, complete=False), line(-2.0)]
    assert behind(lines) == [1, 3]
    assert behind([line(-1.0, blank=True), line(-2.0, complete=False)]) == []
