"""Where a text may be cut: words, characters and tokens stay whole, with any tokenizer's split."""

import unicodedata

import pytest
from code_tokenizers import SPLITS, code_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.cut_places import (
    KeepsTokens,
    boundary_before,
    divides_character,
    may_cut,
    place_cut,
)
from midfill.models.tokens.tokenizer import keeps_tokens_of

WORDS = ["word", "x1", "_", "7", "3.14", "don't", "'s", "return x", "漢字", "é", "a" * 300]
BLANKS = ["\n", "\r\n", "\r", "    ", "\t", " ", "\n\n\n", " \n\n    ", "\u3000", "\u2028", "\x0b"]
SIGNS = ["(", "()", "):", ";", "{", "}", '"', "=" * 40, "#" * 700, " " * 300, "\n" * 300]
CHARACTERS = ["e\u0301", "🙂", "👩\u200d💻", "👍🏽", "🇩🇪", "🇫🇷🇩🇪"]
LINES = ["\n    return x", "\n        x = 1", "):\r\n    ", "\n\n\n    y", " \n        \n    z()"]
PIECES = st.sampled_from([*WORDS, *BLANKS, *SIGNS, *CHARACTERS, *(4 * LINES)])
TEXTS = st.lists(PIECES, max_size=40).map("".join)


def keeps(split: str) -> KeepsTokens:
    return keeps_tokens_of(code_tokenizer(split))


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(0, 60), TEXTS)
def test_the_whole_text_has_the_same_tokens_cut_or_not(
    split: str, prefix: str, gap: int, answer: str
) -> None:
    cut = place_cut(prefix, gap, keeps(split))
    assert 0 <= cut <= max(0, len(prefix) - gap)
    encode = code_tokenizer(split).encode
    head, rest = prefix[:cut], prefix[cut:]
    assert encode(head) + encode(rest) == encode(prefix)
    assert encode(head) + encode(rest + answer) == encode(prefix + answer)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 900))
def test_words_and_characters_stay_whole(prefix: str, gap: int) -> None:
    cut = place_cut(prefix, gap)
    if cut:
        before, after = prefix[cut - 1], prefix[cut]
        assert not ((before.isalnum() or before == "_") and (after.isalnum() or after == "_"))
        assert before + after != "\r\n"
        assert unicodedata.category(after)[0] != "M"
        assert "\u200d" not in (before, after)


@pytest.mark.parametrize(
    ("split", "head"),
    [("gpt-2", "\n        return here"), ("smollm", "\n        return here"), ("qwen2", "here\n")],
)
def test_a_line_is_cut_where_the_vocabulary_allows(split: str, head: str) -> None:
    """GPT-2's split joins a line break to the indentation after it; Qwen's doesn't."""
    prefix = "def f():\n        return here\n        return there and anywhere\n"
    cut = place_cut(prefix, 20, keeps(split))
    assert prefix[:cut].endswith(head)


def test_a_bracket_stays_with_the_line_break_that_its_vocabulary_joins() -> None:
    prefix = "    def get(self, key='it'):\r\n        return self[key]"
    model = code_tokenizer("qwen2")
    assert b"'):\r\n" in [model.token_bytes(token) for token in model.encode(prefix)]
    assert prefix[: place_cut(prefix, 16, keeps("qwen2"))].endswith("):\r\n")


def test_a_cut_is_between_lines_if_a_line_is_near() -> None:
    prefix = "first line\nsecond line\n" + "word " * 40
    assert place_cut(prefix, 150) == len("first line\nsecond line\n")


def test_a_long_line_is_cut_at_a_space() -> None:
    prefix = "const a=1;" + "word " * 400
    cut = place_cut(prefix, 403)
    assert cut == len(prefix) - 406
    assert prefix[cut] == " "


def test_a_line_without_spaces_is_cut_at_a_sign() -> None:
    prefix = "function(){return(ab)};" * 100
    cut = place_cut(prefix, 400)
    assert len(prefix) - 430 < cut <= len(prefix) - 400
    assert not (prefix[cut - 1].isalnum() and prefix[cut].isalnum())


@pytest.mark.parametrize("letter", ["a", "=", " ", "\n", "漢", "\u0301"])
def test_a_text_without_a_place_is_not_cut(letter: str) -> None:
    for split in SPLITS:
        assert place_cut(letter * 5000, 400, keeps(split)) == 0


def test_texts_not_longer_than_the_gap_are_not_cut() -> None:
    assert place_cut("one\ntwo\n", 8) == place_cut("one\ntwo\n", 400) == place_cut("", 0) == 0


def test_the_caret_itself_is_no_place() -> None:
    """What follows the caret is unknown, and could continue the last token."""
    for prefix in ("def f():\n", "return", "x = ", "\n"):
        assert not may_cut(prefix, len(prefix))


@pytest.mark.parametrize("text", ["a" * 1_000_000, "\n" * 1_000_000, "= " * 500_000, "漢" * 10**6])
def test_long_texts_are_searched_in_bounded_steps(text: str) -> None:
    calls = 0

    def never(before: str, after: str) -> bool:
        nonlocal calls
        calls += 1
        assert len(before) + len(after) <= 1100
        return False

    assert place_cut(text, 400, never) == 0
    assert calls < 300


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
FLAGS = "\U0001f1eb\U0001f1f7\U0001f1e9\U0001f1ea"  # France, Germany


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("abc", [1, 2]),
        ("a\r\nb", [1, 3]),
        ("a\n\rb", [1, 2, 3]),
        ("a\n\u0301", [1, 2]),
        ("xe\u0301y", [1, 3]),
        ("a" + FAMILY + "b", [1, 6]),
        ("\U0001f44d\U0001f3fd!", [2]),
        (FLAGS, [2]),
        ("a\u0915\u094d\u0937", [1, 3]),  # a consonant after a virama stands for itself
        ("\u1112\u1161\u11ab\u1100", [3]),  # a syllable in parts, then the next one's first
    ],
)
def test_a_character_of_several_code_points_stays_whole(text: str, whole: list[int]) -> None:
    places = range(1, len(text))
    assert [place for place in places if not divides_character(text, place)] == whole


def test_the_ends_of_a_text_divide_nothing() -> None:
    for text in ("", "\u0301", "\n"):
        assert not divides_character(text, 0)
        assert not divides_character(text, len(text))


def test_a_boundary_is_the_last_one_that_divides_nothing() -> None:
    text = "ab" + FAMILY + "c"
    assert [boundary_before(text, place) for place in range(len(text) + 1)] == [
        0, 1, 2, 2, 2, 2, 2, 7, 8,
    ]  # fmt: skip


def test_combining_marks_without_end_are_divided_somewhere() -> None:
    text = "a" + "\u0301" * 1000
    assert boundary_before(text, 100) == 0
    assert boundary_before(text, 900) == 900
