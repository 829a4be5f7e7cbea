"""bench conversations: rows, resumption, and answers that the method doesn't see beforehand."""

from pathlib import Path

import pytest

from benchmarks.conversations import measure
from benchmarks.conversations.dialogues import Dialogue, draw_dialogue
from benchmarks.conversations.measure import (
    FULL,
    OWN,
    ConversationsReport,
    answers_table,
    held_table,
    measure_conversations,
    routing_table,
)
from midfill.errors import MidfillError
from midfill_lab.bench.methods.session import MethodSession

METHOD = "epicache:budget=24,block=32,turns=2"


def short_dialogue(kind: str, seed: int) -> Dialogue:
    """Return the beginning of a dialogue, which the tiny model has room for."""
    whole = draw_dialogue(kind, seed)
    asked = tuple(one for one in whole.asked if one.line < 3)
    return Dialogue(whole.lines[:3], whole.topics[:3], asked)


def run(folder: Path, **options: object) -> ConversationsReport:
    return measure_conversations(
        str(folder), encoder=None, method=METHOD, routed=2, dialogues=1, histories=(100, 200),
        threads=1, **options,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "draw_dialogue", short_dialogue)
    monkeypatch.setattr(measure, "BOUNDED", METHOD)
    monkeypatch.delitem(measure.VARIANTS, measure.ALPHA)  # not calibrated


def test_a_run_can_be_continued_and_its_tables_have_all_variants(tiny_folder: Path) -> None:
    saved: list[ConversationsReport] = []
    report = run(tiny_folder, save=saved.append)
    assert saved[-1] == report
    names = [FULL, *measure.VARIANTS]
    names.remove("corrected means route")  # without an encoder, that is the method itself
    assert [one.variant for one in report.answers] == [name for name in names for _ in range(3)]
    asked = sum(len(short_dialogue(kind, 0).asked) for kind in measure.KINDS)
    assert sum(len(one.logprobs) for one in report.answers if one.variant == OWN) == asked
    assert {name for one in report.routing for name in one.right} == {
        "plain means", "corrected means",
    }  # fmt: skip
    first, second = report.held
    assert first.peak == second.peak <= 24 + 32 + 32
    assert first.kept < first.peak
    again = run(tiny_folder, earlier=saved[len(saved) // 2])
    assert again.answers == report.answers
    assert again.held == report.held
    text = answers_table(report).markdown()
    assert all(f"\n| {name} |" in text for name in names)
    assert routing_table(report).markdown().count("\n| ") == 4
    assert held_table(report).markdown().count("\n| 200 |") == 1
    with pytest.raises(MidfillError, match="measured something else"):
        measure_conversations(str(tiny_folder), encoder=None, earlier=report)


def test_a_known_answer_has_the_likelihoods_that_it_has_as_a_prompt(tiny_folder: Path) -> None:
    session = MethodSession(str(tiny_folder), threads=1)
    prompt, answer = session.encode("Mia: Who?\nLeo: That was"), [7, 90, 33]
    found = session.answer_likelihoods(prompt, answer, "none")
    whole = session.log_likelihoods([*prompt, *answer], "none", len(prompt), len(prompt))
    assert found.tolist() == whole.tolist()
    session.close()
