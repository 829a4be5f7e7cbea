"""How sure an answer is: what its tokens tell, up to the end of its first line."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from midfill.infill.confidence import (
    START_TOKENS,
    AnswerConfidence,
    Estimator,
    Features,
    TokenScore,
)

SURE = TokenScore(-0.1, 2.0, 0.3)
UNSURE = TokenScore(-1.5, -0.2, 1.4)
logprobs = st.floats(-30, -0.001)


def follow(prefix: str, *tokens: tuple[TokenScore, str]) -> AnswerConfidence:
    answer = AnswerConfidence(prefix)
    for score, text in tokens:
        answer.push(score, text)
    return answer


def line_of(answer: AnswerConfidence) -> Features:
    features = answer.line()
    assert features is not None
    return features


def test_a_line_is_as_sure_as_its_tokens_together_and_its_closest_decision() -> None:
    features = line_of(follow("x = ", (SURE, "f"), (UNSURE, "oo"), (SURE, "()")))
    assert features == Features(pytest.approx(-1.7), -0.2, 1.4, 0.0)


def test_nothing_after_the_first_line_that_has_text_counts() -> None:
    answer = follow("def f():", (SURE, "\n    "), (SURE, "return"), (SURE, "\n"))
    assert answer.line_ended
    before = answer.line()
    answer.push(UNSURE, "x = 1\n")
    assert answer.line() == before


def test_line_breaks_before_any_text_end_no_line() -> None:
    answer = follow("def f():", (SURE, "\n\n  "))
    assert answer.is_blank
    assert not answer.line_ended


def test_the_first_tokens_are_judged_by_themselves() -> None:
    answer = follow("", (SURE, "a"))
    assert not answer.knows_start
    answer.push(SURE, "b")
    assert answer.knows_start
    start = answer.start()
    answer.push(UNSURE, "c")
    assert answer.start() == start == Features(START_TOKENS * -0.1, 2.0, 0.3, 0.0)
    assert line_of(answer).joint == pytest.approx(-1.7)


def test_a_line_that_stands_above_is_told_apart() -> None:
    document = "    total += 1\nprint(total)\n    tot"
    assert line_of(follow(document, (SURE, "al += 1"))).repeats
    assert not line_of(follow(document, (SURE, "al -= 1"))).repeats
    assert not line_of(follow(document, (SURE, ""), (SURE, "\n"))).repeats


def test_without_tokens_nothing_is_known() -> None:
    answer = AnswerConfidence("x")
    assert answer.start() is answer.line() is None


@given(logprobs, st.lists(logprobs, max_size=5))
def test_given_what_it_has_to_begin_with_a_token_is_at_least_as_probable(
    logprob: float, others: list[float]
) -> None:
    plain = TokenScore.of(logprob, others)
    given_bytes = TokenScore.of(logprob, others, conditional=True)
    together = math.fsum(math.exp(each) for each in (logprob, *others))
    assert given_bytes.logprob == pytest.approx(logprob - math.log(together), abs=1e-9)
    assert given_bytes.margin == pytest.approx(plain.margin)


def test_the_only_possible_token_is_certain() -> None:
    assert TokenScore.of(-7.0, [], conditional=True) == TokenScore(0.0, math.inf, 0.0)
    assert Features.of([TokenScore.of(-7.0, [], conditional=True)], False).margin < math.inf


@given(st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5), st.floats(-50, 0))
def test_an_estimate_is_a_probability_whatever_the_weights(
    numbers: list[float], joint: float
) -> None:
    estimate = Estimator(*numbers).probability(Features(joint, 1.0, 0.5, 1.0))
    assert 0.0 <= estimate <= 1.0


def test_an_estimate_is_the_logistic_function_of_the_weighted_features() -> None:
    estimator = Estimator(intercept=0.5, joint=2.0, margin=-1.0, entropy=3.0, repeats=4.0)
    logit = 0.5 + 2.0 * -0.25 - 1.0 * 0.5 + 3.0 * 0.1 + 4.0
    assert estimator.probability(Features(-0.25, 0.5, 0.1, 1.0)) == pytest.approx(
        1 / (1 + math.exp(-logit))
    )
