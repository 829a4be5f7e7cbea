"""Dialogues: every fact is told once, where it is said to be, and asked about without its name."""

import pytest

from benchmarks.conversations.dialogues import KINDS, draw_dialogue


@pytest.mark.parametrize("kind", KINDS)
def test_every_fact_is_told_once(kind: str) -> None:
    for seed in range(3):
        dialogue = draw_dialogue(kind, seed)
        assert dialogue == draw_dialogue(kind, seed) != draw_dialogue(kind, seed + 1)
        assert len(dialogue.topics) == len(dialogue.lines)
        assert len({asked.answer for asked in dialogue.asked}) == len(dialogue.asked) == 20
        for asked in dialogue.asked:
            telling = [n for n, line in enumerate(dialogue.lines) if asked.answer in line]
            assert telling == [asked.line]
            assert dialogue.topics[asked.line] == asked.topic
            assert asked.answer not in asked.question
            assert dialogue.text.count(asked.answer) == 1
        assert len(set(dialogue.topics)) == 4
        assert len({asked.question for asked in dialogue.asked}) == 20


def test_only_the_first_kind_repeats_words() -> None:
    for kind in KINDS:
        dialogue = draw_dialogue(kind, 0)
        repeated = 0
        for asked in dialogue.asked:
            words = {word for word in asked.question.lower().split() if len(word) > 4}
            repeated += len(words & set(dialogue.lines[asked.line].lower().split())) > 1
        assert (repeated > 17) if kind == "repeated" else (repeated < 3), kind
