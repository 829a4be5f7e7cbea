"""Turns, windows and questions of prompts, found by token ids."""

import numpy as np
import pytest

from midfill.methods.episodes.turns import TurnReader

WORD, STOP, LINE, END = 4, 1, 2, 3
TEXTS = [b"", b".", b"\n", b"", b"word ", b"long " * 60]
"""Tokens: nothing, a full stop, a newline, the end of a message, a word, and 300 characters."""
READER = TurnReader.of(lambda token: TEXTS[token], len(TEXTS), (END,))


def tokens(text: str) -> np.ndarray:
    names = {"w": WORD, ".": STOP, "/": LINE, "|": END, "L": 5}
    return np.array([names[each] for each in text], np.int32)


@pytest.mark.parametrize(
    ("text", "history", "first", "question"),
    [
        ("ww/ww/www/w", 6, 3, 6),  # two turns, a question, the answer's beginning
        ("ww|ww|www|w", 6, 3, 6),
        ("w/w|w/w|w/w|w/", 8, 4, 8),  # lines within messages are no turns
        ("ww///w/", 5, 5, 5),  # empty lines belong to the turn before
        ("|ww/w/", 4, 4, 4),  # the model's first token ends nothing
        ("ww/w", 0, 0, 0),  # nothing before the question
        ("wwww", 0, 0, 0),
    ],
)
def test_the_last_complete_turn_and_what_follows_is_the_question(
    text: str, history: int, first: int, question: int
) -> None:
    assert READER.read(tokens(text)) == (history, first, question)


def test_a_history_may_be_given() -> None:
    assert READER.read(tokens("ww/w/ww"), 4) == (4, 3, 4)
    assert READER.read(tokens("wwwwww"), 4) == (4, 4, 4)


@pytest.mark.parametrize(
    ("text", "first", "turns", "bounds"),
    [
        ("w/ww/w/www/w/", 0, 2, [0, 5, 11, 13]),
        ("w/ww/w/www/w/", 2, 2, [2, 7, 13]),  # without a system prompt
        ("w/w/w/ww", 0, 3, [0, 6, 8]),  # a turn that has not ended is one, too
        ("www", 0, 4, [0, 3]),
        ("w/", 2, 4, [2]),
        ("LL.LL.w./w/", 0, 1, [0, 3, 6, 9, 11]),  # a long turn counts as its sentences
        ("LLLL/w/", 0, 1, [0, 5, 7]),  # one without an end of a sentence stays whole
        ("w.w.w.w./w/", 0, 1, [0, 9, 11]),
    ],
)
def test_windows_are_some_turns_each(text: str, first: int, turns: int, bounds: list[int]) -> None:
    found = READER.windows(tokens(text), first, turns, longest=500)
    assert found.tolist() == bounds
    assert found.dtype == np.int32
