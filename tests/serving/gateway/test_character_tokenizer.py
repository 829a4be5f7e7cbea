"""Prompts as characters, for models whose tokenizer is not at hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.errors import InvalidRequestError
from midfill.serving.gateway.character_tokenizer import (
    WORD_JOINER,
    CharacterTokenizer,
    PromptText,
    SpelledTokens,
)

TOKENIZER = CharacterTokenizer({"<PRE>": 7, "<SUF>": None})
PRE, SUF = TOKENIZER.special_tokens["<PRE>"], TOKENIZER.special_tokens["<SUF>"]


@given(st.text(max_size=40), st.text(max_size=40))
def test_a_prompt_is_its_texts_again(one: str, other: str) -> None:
    ids = [PRE, *TOKENIZER.encode(one), SUF, *TOKENIZER.encode(other)]
    parts = TOKENIZER.parts(ids)
    assert "".join(part.text for part in parts) == f"<PRE>{one}<SUF>{other}"
    assert [part.text for part in parts if part.special] == ["<PRE>", "<SUF>"]
    assert TOKENIZER.decode(ids) == one + other


def test_text_never_becomes_a_sentinel_and_raw_text_may() -> None:
    assert TOKENIZER.parts(TOKENIZER.encode("<PRE>")) == [PromptText("<PRE>", special=False)]
    raw = TOKENIZER.encode("<PRE>", parse_special=True)
    assert TOKENIZER.parts([*raw, *TOKENIZER.encode("a")]) == [
        PromptText("<PRE>", special=True),
        PromptText("a", special=False),
    ]


def test_special_tokens_have_the_models_ids_where_they_are_known() -> None:
    assert TOKENIZER.model_ids([PRE, SUF, 42]) == ([7, 42], ["<SUF>"])


@pytest.mark.parametrize(
    ("text", "healed"),
    [
        ("x = pri", " pri"),
        ("x.pri", "pri"),
        ("pri", "pri"),
        ("return ", " "),
        ("    ", ""),
        ("x = (", ""),
        ("a\n", ""),
        ("x = 'é", "é"),
        ("a" * 60, ""),
    ],
)
def test_the_unfinished_word_goes_with_its_blank(text: str, healed: str) -> None:
    found = TOKENIZER.back_off([PRE, *TOKENIZER.encode(text)], 1)
    assert (found.required.decode(), found.removed) == (healed, len(healed))


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        TOKENIZER.encode("\ud800")


class TestSpelledTokens:
    @given(st.text(alphabet="<|fim_suffx>pre[/INST]se ", max_size=60))
    def test_no_part_spells_one_and_together_they_are_the_text(self, text: str) -> None:
        spelled = SpelledTokens()
        parts = spelled.split(text)
        assert "".join(parts) == text
        assert all(len(spelled.split(part)) <= 1 for part in parts)
        escaped = spelled.escape(text)
        assert len(spelled.split(escaped)) <= 1
        assert escaped.replace(WORD_JOINER, "") == text

    def test_tokens_that_a_user_names_are_found(self) -> None:
        assert SpelledTokens(("<%mid%>",)).split("a<%mid%>b") == ["a<", "%mid%>b"]
