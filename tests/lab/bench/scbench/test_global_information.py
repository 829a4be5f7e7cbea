"""Answers about the whole context are what counting and sorting it gives."""

import random
import re

from midfill_lab.bench.scbench.global_information import (
    PASSAGES_PER_PART,
    many_shot,
    math_find,
    summary,
)
from midfill_lab.bench.scbench.packages import PackageTexts


def test_statistics_are_those_of_the_list(texts: PackageTexts) -> None:
    for seed in range(5):
        draft = math_find(random.Random(seed), 100, 5, texts)
        numbers = sorted(map(int, re.findall(r"\d+", draft.context)))
        expected = {
            "largest number": numbers[-1],
            "smallest number": numbers[0],
            "median": numbers[len(numbers) // 2],
            "second largest number": numbers[-2],
            "second smallest number": numbers[1],
        }
        assert len(numbers) % 2 == 1
        found = {
            re.sub(r"\nThe (.+) in the list is", r"\1", t.question): t.gold for t in draft.turns
        }
        assert found == {name: f" {value}" for name, value in expected.items()}


def test_new_things_have_the_label_of_their_kind(texts: PackageTexts) -> None:
    draft = many_shot(random.Random(0), 300, 5, texts)
    shown = dict(re.findall(r"^(\w+ \w+) -> (\w+)$", draft.context, re.MULTILINE))
    kinds = {thing.split()[1]: label for thing, label in shown.items()}
    for turn in draft.turns:
        thing = turn.question.strip().removesuffix(" ->")
        assert thing not in shown
        assert turn.accepted == (kinds[thing.split()[1]],)
    assert len(set(kinds.values())) == 4


def test_a_summary_is_what_its_part_says_first(texts: PackageTexts) -> None:
    draft = summary(random.Random(0), 8, 4, texts)
    parts = re.split(r"^Part \d+\n\n", draft.context, flags=re.MULTILINE)[1:]
    assert len(parts) == 8
    for turn in draft.turns:
        (number,) = re.findall(r"part (\d+)", turn.question)
        paragraphs = parts[int(number) - 1].strip().split("\n\n")
        assert len(paragraphs) == PASSAGES_PER_PART
        leads = [f"- {paragraph[: paragraph.index('.') + 1]}" for paragraph in paragraphs]
        assert turn.gold.splitlines() == leads
