"""How sure an answer is, from the engine's log probabilities, and when that decides."""

import math
from pathlib import Path

import pytest

from midfill.engine.request import EngineOutput, FinishReason, TokenLogprobs
from midfill.frontend.answer import AnswerBuilder, AnswerDelta, StopStrings
from midfill.frontend.confidence import ConfidenceCheck
from midfill.frontend.sampling import SamplingParams
from midfill.infill.confidence import ConfidenceRule, Estimator
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.tokenizer import Tokenizer

LIKELY, UNLIKELY = -0.01, -5.0
END_OF_TEXT = 0
# The estimate is a half where the tokens' log probabilities add up to -1.
HALF = Estimator(1.0, 1.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_folder).tokenizer


def check_of(
    tokenizer: Tokenizer,
    least: float = 0.5,
    *,
    streamed: bool = False,
    begins_with: bytes = b"",
    has_rule: bool = True,
) -> ConfidenceCheck:
    rule = ConfidenceRule(HALF, HALF, 0.5) if has_rule else None
    return ConfidenceCheck(least, rule, "", begins_with, tokenizer, streamed=streamed)


def output(
    token_ids: list[int], logprob: float, finish_reason: FinishReason | None = None
) -> EngineOutput:
    return EngineOutput(
        request_id="r",
        index=0,
        token_ids=token_ids,
        logprobs=[TokenLogprobs(logprob, [])],
        finish_reason=finish_reason,
    )


def answered(
    tokenizer: Tokenizer, check: ConfidenceCheck, *tokens: tuple[str, float], ends: bool = True
) -> list[AnswerDelta | None]:
    """Push one token after the other, then the end; return each one's delta."""
    answer = AnswerBuilder(0, tokenizer, SamplingParams(), StopStrings(()), check=check)
    outputs = [
        output([token], logprob) for text, logprob in tokens for token in tokenizer.encode(text)
    ]
    if ends:
        outputs.append(output([END_OF_TEXT], LIKELY, "stop"))
    return [answer.push(output) for output in outputs]


def test_a_sure_answer_is_shown_whole_with_its_estimate(tokenizer: Tokenizer) -> None:
    *before, last = answered(tokenizer, check_of(tokenizer), ("a", LIKELY), ("b", LIKELY))
    assert before == [None, None]
    assert last is not None
    assert (last.text, last.finish_reason) == ("ab", "stop")
    assert last.confidence is not None
    assert last.confidence.estimate == pytest.approx(1 / (1 + math.exp(-(1 + 3 * LIKELY))))


def test_an_unsure_answer_is_empty_and_ends_with_its_first_line(tokenizer: Tokenizer) -> None:
    tokens = (("a", UNLIKELY), ("\n", LIKELY), ("b", LIKELY))
    first, withheld, later = answered(tokenizer, check_of(tokenizer), *tokens, ends=False)
    assert first is None
    assert withheld is not None
    assert (withheld.text, withheld.finish_reason) == ("", "stop")
    assert len(withheld.token_ids) == 2
    assert later is None


def test_what_follows_the_first_line_does_not_make_it_unsure(tokenizer: Tokenizer) -> None:
    tokens = (("a", LIKELY), ("\n", LIKELY), ("b", UNLIKELY))
    _, shown, *_ = answered(tokenizer, check_of(tokenizer), *tokens)
    assert shown is not None
    assert shown.text == "a\n"


def test_a_streamed_answer_begins_one_token_later_and_then_goes_on(tokenizer: Tokenizer) -> None:
    tokens = (("a", LIKELY), ("b", LIKELY), ("c", UNLIKELY))
    deltas = answered(tokenizer, check_of(tokenizer, streamed=True), *tokens)
    assert [None if delta is None else delta.text for delta in deltas] == [None, "ab", "c", ""]


def test_a_streamed_answer_whose_first_tokens_are_unsure_is_empty(tokenizer: Tokenizer) -> None:
    tokens = (("a", UNLIKELY), ("b", LIKELY), ("c", LIKELY))
    deltas = answered(tokenizer, check_of(tokenizer, streamed=True), *tokens)
    assert [None if delta is None else delta.text for delta in deltas] == [None, "", None, None]
    assert deltas[1] is not None
    assert deltas[1].finish_reason == "stop"


@pytest.mark.parametrize(("least", "has_rule"), [(0.0, True), (0.9, False)])
def test_nothing_is_held_back_without_a_threshold_or_a_rule(
    tokenizer: Tokenizer, least: float, has_rule: bool
) -> None:
    check = check_of(tokenizer, least, has_rule=has_rule)
    first, last = answered(tokenizer, check, ("a", UNLIKELY))
    assert first is not None
    assert first.text == "a"
    assert last is not None
    assert last.confidence is not None
    assert (last.confidence.estimate is not None) == has_rule


def test_a_blank_answer_suggests_nothing(tokenizer: Tokenizer) -> None:
    *_, last = answered(tokenizer, check_of(tokenizer, 0.0), (" ", LIKELY))
    assert last is not None
    assert last.confidence is not None
    assert last.confidence.estimate == 0.0


def test_tokens_that_the_text_before_the_caret_rules_out_count_for_nothing(
    tokenizer: Tokenizer,
) -> None:
    (wanted,), (other,), (same,) = (tokenizer.encode(text) for text in "abc")

    def joint(begins_with: bytes) -> float:
        check = check_of(tokenizer, begins_with=begins_with)
        check.observe(wanted, TokenLogprobs(-3.0, [(other, -0.1), (same, -4.0)]), "a")
        found = check.confidence()
        assert found is not None
        return found.line.joint

    assert joint(b"a") == pytest.approx(0.0)
    assert joint(b"") == -3.0
