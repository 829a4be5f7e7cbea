"""Samples: as long as was asked for, the same for the same seed, and with answers that fit."""

import dataclasses
import random

import pytest

from midfill.errors import MidfillError
from midfill_lab.bench.scbench.global_information import PASSAGES_PER_PART
from midfill_lab.bench.scbench.packages import PackageTexts
from midfill_lab.bench.scbench.samples import SampleMaker, take_items
from midfill_lab.bench.scbench.tasks import TASKS, Task

every_task = pytest.mark.parametrize("task", list(TASKS.values()), ids=list(TASKS))


@every_task
def test_a_sample_is_as_long_as_was_asked_for(task: Task, maker: SampleMaker) -> None:
    sample = maker.make(task.name, task.draft, 0)
    counted = len(sample.context)
    counted += sum(len(each.question) + each.limit for each in sample.exchanges)
    assert counted == sample.tokens
    assert 0.85 * maker.length < sample.tokens <= maker.length
    assert len(sample.exchanges) == maker.turns
    for each in sample.exchanges:
        assert 0 < len(each.answer) <= each.limit


@every_task
def test_the_seed_and_the_number_choose_it(task: Task, maker: SampleMaker) -> None:
    sample = maker.make(task.name, task.draft, 0)
    assert maker.make(task.name, task.draft, 0) == sample
    assert maker.make(task.name, task.draft, 0).digest == sample.digest
    other = dataclasses.replace(maker, seed=1)
    assert other.make(task.name, task.draft, 0).digest != sample.digest
    assert maker.make(task.name, task.draft, 1).digest != sample.digest


@every_task
def test_in_turn_the_right_answers_stand_between_questions(
    task: Task,
    maker: SampleMaker,
) -> None:
    sample = maker.make(task.name, task.draft, 0)
    first, second, *_ = sample.exchanges
    assert sample.asked_in_turn(0) == sample.asked_alone(0)
    assert sample.asked_in_turn(1) == [
        *sample.context, *first.question, *first.answer, *second.question,
    ]  # fmt: skip
    assert sample.asked_alone(1) == [*sample.context, *second.question]


@every_task
def test_too_short_a_length_is_refused(task: Task, maker: SampleMaker) -> None:
    short = dataclasses.replace(maker, length=60)
    with pytest.raises(MidfillError, match=f"--length 60 is too short for {task.name}"):
        short.make(task.name, task.draft, 0)


def test_no_more_items_are_taken_than_there_are(texts: PackageTexts) -> None:
    with pytest.raises(MidfillError, match="hold 600 functions, 601 are needed: choose a shorter"):
        take_items(random.Random(0), texts.functions, 601, "functions")


def test_texts_may_run_out_where_fewer_fill_the_context(
    texts: PackageTexts, maker: SampleMaker
) -> None:
    task = TASKS["summary"]
    sample = maker.make("summary", task.draft, 0)
    parts = sample.text.count("Part ")
    enough = dataclasses.replace(texts, passages=texts.passages[: PASSAGES_PER_PART * (parts + 1)])
    again = dataclasses.replace(maker, texts=enough).make("summary", task.draft, 0)
    assert again.text.count("Part ") == parts
    few = dataclasses.replace(texts, passages=texts.passages[: PASSAGES_PER_PART * (parts - 1)])
    with pytest.raises(MidfillError, match=f"{PASSAGES_PER_PART * parts} are needed"):
        dataclasses.replace(maker, texts=few).make("summary", task.draft, 0)
