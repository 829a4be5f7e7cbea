"""A half word as a regular expression and as a grammar."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.serving.gateway.upstream_api import start_grammar, start_regex

TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)


@given(start=TEXTS, rest=TEXTS)
def test_the_regular_expression_matches_whatever_begins_with_the_text(
    start: str, rest: str
) -> None:
    assert re.fullmatch(start_regex(start), start + rest)


@given(start=TEXTS.filter(bool), other=TEXTS)
def test_and_nothing_else(start: str, other: str) -> None:
    matches = re.fullmatch(start_regex(start), other) is not None
    assert matches == other.startswith(start)


@pytest.mark.parametrize(
    ("start", "grammar"),
    [
        (" pri", r'root ::= " pri" [^\x00]*'),
        ('\n\t"a\\', r'root ::= "\n\t\"a\\" [^\x00]*'),
        ("größe", r'root ::= "größe" [^\x00]*'),
    ],
)
def test_the_grammar_spells_the_text(start: str, grammar: str) -> None:
    assert start_grammar(start) == grammar
