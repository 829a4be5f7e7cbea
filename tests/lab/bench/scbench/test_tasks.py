"""SCBench's twelve tasks, by name."""

from collections import Counter

import pytest

from midfill.errors import OptionError
from midfill_lab.bench.scbench.samples import SampleMaker
from midfill_lab.bench.scbench.scoring import score_answer
from midfill_lab.bench.scbench.tasks import TASKS, choose_tasks


def test_there_are_twelve_of_four_kinds() -> None:
    assert Counter(task.capability for task in TASKS.values()) == {
        "string retrieval": 3,
        "semantic retrieval": 4,
        "global information": 3,
        "multi-task": 2,
    }
    assert choose_tasks(None) == list(TASKS.values())
    assert [task.name for task in choose_tasks("vt, kv,vt")] == ["vt", "kv"]


def test_an_unknown_task_is_one_clear_line() -> None:
    with pytest.raises(OptionError, match="there is no task 'kw'; there are kv, prefix_suffix"):
        choose_tasks("kw")
    with pytest.raises(OptionError, match="--tasks names nothing; there are kv"):
        choose_tasks(" ,")


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answer_scores_one_and_nothing_scores_zero(name: str, maker: SampleMaker) -> None:
    for each in maker.make(name, TASKS[name].draft, 0).exchanges:
        turn = each.turn
        assert score_answer(turn.metric, turn.gold, turn.accepted, turn.others) == 1.0
        assert score_answer(turn.metric, "", turn.accepted, turn.others) == 0.0
