"""A prompt's tokens, and where each begins in its text."""

import hypothesis.strategies as st
import pytest
from code_tokenizers import code_tokenizer
from hypothesis import given
from tiny_checkpoints import tiny_tokenizer

from midfill.engine.request import TokenLogprobs
from midfill.frontend.answer import Answer
from midfill.frontend.confidence import Confidence
from midfill.frontend.generation import (
    PromptToken,
    best_first,
    prompt_tokens,
)
from midfill.infill.confidence import Features
from midfill.models.tokens.tokenizer import Tokenizer

TINY = Tokenizer(tiny_tokenizer())


def describe(token_ids: list[int], text: str, tokenizer: Tokenizer) -> tuple[PromptToken, ...]:
    scores = [TokenLogprobs(-float(number), [(70, -0.5)]) for number in range(1, len(token_ids))]
    return prompt_tokens(token_ids, text, scores, tokenizer)


@pytest.mark.parametrize("split", ["gpt-2", "qwen2", "llama3"])
@given(st.text(alphabet="ab \n=é🙂", min_size=1, max_size=30))
def test_offsets_lead_to_each_tokens_text(split: str, text: str) -> None:
    tokenizer = code_tokenizer(split)
    tokens = describe(tokenizer.encode(text), text, tokenizer)
    assert tokens[0].offset == 0
    ends = [*(token.offset for token in tokens[1:]), len(text)]
    for token, end in zip(tokens, ends, strict=True):
        written = text[token.offset : end]
        assert token.text == written or "�" in token.text


def test_the_first_token_has_no_score_and_each_later_one_its_own() -> None:
    tokens = describe(TINY.encode("def f("), "def f(", TINY)
    assert [token.logprob for token in tokens] == [
        None,
        *(-float(i) for i in range(1, len(tokens))),
    ]
    assert tokens[0].top == ()
    assert tokens[1].top[0].token_id == 70


def generated(text: str, joint: float | None) -> Answer:
    line = Features(joint or 0.0, 0.0, 0.0, 0.0)
    confidence = None if joint is None else Confidence(line, line, None)
    return Answer(text, (), "stop", None, (), confidence)


def test_the_most_probable_answer_comes_first_and_those_without_text_last() -> None:
    answers = [generated(" ", -0.1), generated("a", -2.0), generated("b", -1.0)]
    assert [answer.text for answer in best_first(answers)] == ["b", "a", " "]
    unknown = [generated("a", None), generated("b", None)]
    assert best_first(unknown) == unknown


def test_special_tokens_count_where_they_are_spelled_and_not_where_they_were_added() -> None:
    end = TINY.special_tokens["<|endoftext|>"]
    spelled = describe([end, *TINY.encode("ab")], "<|endoftext|>ab", TINY)
    assert [token.offset for token in spelled] == [0, 13, 14]
    assert spelled[0].text == "<|endoftext|>"
    added = describe([end, *TINY.encode("ab")], "ab", TINY)
    assert [token.offset for token in added] == [0, 0, 1]
