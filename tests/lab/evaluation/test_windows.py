"""The smallest window that is as good is chosen; what windows cost is counted step by step."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from midfill.errors import MidfillError
from midfill.infill.cut_places import keeps_any_tokens
from midfill.infill.planner import Planner
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.system.progress import StageProgress
from midfill_lab.evaluation.conditions import PromptOptions, make_prompt
from midfill_lab.evaluation.evaluate import (
    InfillingReport,
    Outcome,
    ProblemRecord,
    RunOptions,
    WindowCost,
    evaluate,
    load_problems,
    measure_costs,
)
from midfill_lab.evaluation.models import Answer, ModelPrompt
from midfill_lab.evaluation.problems import Problem, check_file_tasks
from midfill_lab.evaluation.windows import (
    choose_window,
    parse_windows,
    rule_of,
    window_conditions,
)

LINES = "".join(f"value_{number} = compute({number * 7919 % 1000})\n" for number in range(900))
RULES = (WindowRule(200, 50), WindowRule(600, 200))


def hole(caret: int) -> Problem:
    line = LINES.rfind("\n", 0, caret) + 1
    end = LINES.find("\n", caret)
    return Problem(
        id=f"line/a.py:{line}",
        task="line",
        group="a.py",
        prefix=LINES[:caret],
        hole=LINES[caret:end],
        suffix=LINES[end:],
    )


def report(means: dict[str, float], holes: int = 400) -> InfillingReport:
    """A report in which the mean similarity with each window is as given."""
    rng = random.Random(0)
    base = [rng.gauss(0, 0.2) for _ in range(holes)]
    return InfillingReport(
        model="toy",
        options=RunOptions(tasks=("line",)),
        isolation="",
        problems=[ProblemRecord(f"line/{n}", "line", f"file {n % 50}", "0") for n in range(holes)],
        outcomes={
            name: [
                Outcome(
                    "",
                    True,
                    {"similarity": mean + own + rng.gauss(0, 0.1)},
                    cost=WindowCost(1, 1, 1),
                )
                for own in base
            ]
            for name, mean in means.items()
        },
    )


class CharacterCounter:
    """Counts the characters of prompts."""

    def __init__(self) -> None:
        self._planner = Planner(None)
        self.requests: list[InfillRequest] = []

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        self.requests += requests
        return [len(self._planner.plan_and_record(one).planned_prefix) for one in requests]


class Echo(CharacterCounter):
    """A model that answers nothing."""

    format = None
    description = "echo"
    fingerprint = ""
    remote = False
    keeps_tokens = staticmethod(keeps_any_tokens)

    def answer(
        self, prompts: Sequence[ModelPrompt], max_tokens: int, progress: StageProgress
    ) -> list[Answer]:
        return [Answer("", True) for _ in prompts]


def test_windows_are_parsed_the_smallest_first() -> None:
    assert parse_windows("600/200, 200/50") == RULES
    for wrong in ("", "400/100", "400", "4/-1,5/5", "a/b,1/1", "1/2/3,1/1", "4/\u0663,1/1"):
        with pytest.raises(MidfillError, match="--windows"):
            parse_windows(wrong)


def test_the_smallest_window_that_is_as_good_as_the_best_is_recommended() -> None:
    rising = {"4000/1000": 0.56, "400/100": 0.4, "1200/400": 0.55, "2000/600": 0.56}
    choice = choose_window(report(rising), margin=0.05).choice
    assert rule_of(choice.recommended) == WindowRule(1200, 400)
    assert [result.condition for result in choice.choice] == [
        "400/100", "1200/400", "2000/600", "4000/1000",
    ]  # fmt: skip


def test_a_hole_is_asked_with_its_whole_document() -> None:
    problem = hole(20_000)
    requests = [
        make_prompt(condition, None, problem, PromptOptions())
        for condition in window_conditions(RULES)
    ]
    for request, rule in zip(requests, RULES, strict=True):
        assert isinstance(request, InfillRequest)
        assert (request.prefix, request.suffix) == (problem.prefix, problem.suffix)
        assert request.window == rule
    assert len({request.tenant for request in requests if isinstance(request, InfillRequest)}) == 2


def test_costs_are_of_a_document_opened_moved_in_and_typed_in() -> None:
    counter = CharacterCounter()
    problems = [hole(20_005), hole(9_003)]
    costs = measure_costs(counter, problems, RULES[0])
    assert len(costs) == len(problems)
    tenant = counter.requests[0].tenant
    opened, moved, typed = (one for one in counter.requests if one.tenant == tenant)
    assert opened.prefix == LINES[: LINES.rfind("\n", 0, 20_005)]
    assert moved.prefix == LINES[:20_005]
    assert typed.prefix == moved.prefix + "value"
    assert typed.suffix == moved.suffix
    assert {one.window for one in counter.requests} == {RULES[0]}


@pytest.mark.parametrize("text", ["x", "x\ny", "\nx"])
def test_a_hole_in_the_first_line_moves_from_below(text: str) -> None:
    problem = Problem(id="line/1", task="line", group="a", prefix="", hole="x", suffix=text)
    counter = CharacterCounter()
    measure_costs(counter, [problem], RULES[0])
    assert all(one.prefix + one.suffix in (text, "value" + text) for one in counter.requests)


def test_only_long_files_are_used(tmp_path: Path) -> None:
    for name, text in (("long.py", LINES), ("short.py", LINES[:900])):
        (tmp_path / name).write_text(text)
    options = RunOptions(tasks=("line",), limit=5, shortest=12_000)
    problems = load_problems(options, None, [tmp_path])
    assert {Path(problem.group).name for problem in problems} == {"long.py"}
    with pytest.raises(MidfillError, match="no file has 99999 characters"):
        load_problems(RunOptions(tasks=("line",), shortest=99_999), None, [tmp_path])
    with pytest.raises(MidfillError, match="task single-line: too short"):
        check_file_tasks(["line", "single-line"], "too short")


def test_a_run_counts_what_its_windows_cost(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(LINES)
    (tmp_path / "b.py").write_text(LINES.replace("value", "other"))
    options = RunOptions(tasks=("line",), limit=4)
    model = Echo()
    report = evaluate(
        model, load_problems(options, None, [tmp_path]), window_conditions(RULES), options,
        lambda *_: None, lambda _: None,
    )  # fmt: skip
    for name, outcomes in report.outcomes.items():
        for outcome in outcomes:
            assert outcome.cost is not None
            assert outcome.cost.opened <= 1.25 * rule_of(name).before
    stored = msgspec.json.decode(msgspec.json.encode(report), type=InfillingReport)
    assert stored == report


def test_tables_show_costs_beside_scores() -> None:
    measured = report({"400/100": 0.4, "1200/400": 0.56})
    for name, base in (("400/100", 160), ("1200/400", 480)):
        measured.outcomes[name][:] = [
            msgspec.structs.replace(outcome, cost=WindowCost(base + number % 2, base // 2, 1))
            for number, outcome in enumerate(measured.outcomes[name])
        ]
    chosen = choose_window(measured)
    page = chosen.tables().markdown()
    assert "| window | tokens, opened | caret moved | typed | similarity |" in page
    assert "| 1200/400 | 48" in page
    assert "Window: 1200/400, the smallest whose similarity" in page
    assert "the most of any hole with 1200/400: 481 opened, 240 moved, 1 typed" in page
    noted = chosen.measurement()
    assert noted["mean_tokens"] == {
        "400/100": {"opened": 160.5, "moved": 80.0, "typed": 1.0},
        "1200/400": {"opened": 480.5, "moved": 240.0, "typed": 1.0},
    }
