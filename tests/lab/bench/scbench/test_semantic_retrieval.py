"""Answers of semantic retrieval follow from the context, and from nothing else in it."""

import random
import re

from midfill_lab.bench.scbench.packages import PackageTexts
from midfill_lab.bench.scbench.semantic_retrieval import (
    chinese_questions,
    english_questions,
    multiple_choice,
    repository,
)

ASKED = {
    "In which city does (.+) live": "{} has had a flat in (.+) since last spring.",
    "What is the profession of (.+)\\?": "{} earns a living as a (.+).",
    "Which instrument does (.+) play": "{} practises the (.+) every evening.",
    "How does (.+) get to the office": "{} goes to work by (.+).",
    "(.+)现在住在哪里": "{}去年搬到了(.+)。",
    "(.+)是做什么的": "{}的工作是(.+)。",
}


def told(context: str, question: str) -> list[str]:
    """Return what a context says about a question."""
    asked = re.split("Question: |问题: ", question)[1].splitlines()[0]
    for pattern, statement in ASKED.items():
        if match := re.match(pattern, asked):
            return re.findall(f"^{statement.format(match[1])}$", context, re.MULTILINE)
    return []


def test_people_have_one_answer_to_each_question(texts: PackageTexts) -> None:
    draft = english_questions(random.Random(0), 60, 5, texts)
    for turn in draft.turns:
        assert told(draft.context, turn.question) == list(turn.accepted)
        assert turn.gold == f" {turn.accepted[0]}"
    assert draft.context.count("every evening") > 1, "others are told of in the same words"


def test_so_they_have_in_chinese(texts: PackageTexts) -> None:
    draft = chinese_questions(random.Random(0), 60, 5, texts)
    for turn in draft.turns:
        assert told(draft.context, turn.question) == list(turn.accepted)
    assert len(draft.context.splitlines()) == 60 + 5 + 20


def test_one_of_four_choices_is_right(texts: PackageTexts) -> None:
    draft = multiple_choice(random.Random(0), 60, 5, texts)
    for turn in draft.turns:
        choices = dict(re.findall(r"^([A-D])\. (.+)$", turn.question, re.MULTILINE))
        assert len(set(choices.values())) == 4
        right = told(draft.context, turn.question)
        assert [letter for letter, value in choices.items() if value in right] == [*turn.accepted]


def test_functions_are_asked_for_by_what_they_do(texts: PackageTexts) -> None:
    draft = repository(random.Random(0), 30, 5, texts)
    described = {each.description: each.code for each in texts.functions}
    for turn in draft.turns:
        (description,) = re.findall(r"does this: (.+)$", turn.question, re.MULTILINE)
        assert turn.accepted == (described[description],)
        assert draft.context.count(turn.gold) == 1
        assert description not in draft.context
        assert len(turn.others) == 29
        assert turn.accepted[0] not in turn.others
