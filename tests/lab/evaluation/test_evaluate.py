"""An evaluation run: every hole in every condition, with its scores."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from running_server import start

from midfill import LLM
from midfill.errors import MidfillError
from midfill.infill.cut_places import KeepsTokens, keeps_any_tokens
from midfill.infill.formats import FimFormat, Sentinel
from midfill.system.progress import StageProgress
from midfill_lab.evaluation.conditions import CONDITIONS, Condition, choose_conditions
from midfill_lab.evaluation.evaluate import InfillingReport, RunOptions, evaluate, load_problems
from midfill_lab.evaluation.metrics import score_answer
from midfill_lab.evaluation.models import Answer, LocalModel, Model, ModelPrompt, RemoteModel
from midfill_lab.evaluation.problems import Problem, Task, parse_tasks
from midfill_lab.evaluation.report import read_report, write_report

HERE = Path(__file__).parent
SENTINELS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


class Writes:
    """A model that knows every hole and answers with ``written(hole)``."""

    format: FimFormat | None = None
    description = "knows it all"
    fingerprint = "0"
    remote = False

    def __init__(self, problems: Sequence[Problem], written: Callable[[str], Answer]) -> None:
        self._rest = [problem.hole for problem in problems]
        self._written = written
        self.keeps_tokens: KeepsTokens = keeps_any_tokens

    def answer(
        self, prompts: Sequence[ModelPrompt], max_tokens: int, progress: StageProgress
    ) -> list[Answer]:
        some, self._rest = self._rest[: len(prompts)], self._rest[len(prompts) :]
        return [self._written(hole) for hole in some]


def ended(text: str) -> Answer:
    return Answer(text, ended=True)


def options(*tasks: Task, **others: object) -> RunOptions:
    return RunOptions(tasks=tasks, before=200, after=100, max_tokens=6, **others)  # type: ignore[arg-type]


def run(
    model: Model, problems: list[Problem], asked: RunOptions, names: str | None = None
) -> InfillingReport:
    chosen = choose_conditions(
        None if names is None else names.split(","), model.format, remote=model.remote
    )
    return evaluate(model, problems, chosen, asked, lambda *_: None, lambda _: None)


def means(report: InfillingReport, condition: str) -> dict[str, float]:
    outcomes = report.outcomes[condition]
    return {
        name: sum(outcome.scores[name] for outcome in outcomes) / len(outcomes)
        for name in outcomes[0].scores
    }


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (ended, (1, 1, 1, 1, 1)),
        (lambda hole: Answer(hole, ended=False), (1, 1, 1, 1, 0)),
        (lambda hole: ended(hole.rstrip()), (0.4, 1, 1, 1, 1)),  # "if x:  return y" can be one line
        (lambda hole: ended(hole + "x = = y\n"), (0, 1, 0, 1, 0)),
        (lambda hole: ended(hole + "    pass # as good\n"), (None, 1, 0, 1, 0)),
        (lambda hole: ended(""), (0, 0, 0, 0, 1)),
        (lambda hole: ended("    import os; os._exit(0)\n"), (0, 0, 0, 0, 1)),
    ],
)
def test_scores_of_single_line_answers(
    humaneval: Path, written: Callable[[str], Answer], expected: tuple[float | None, ...]
) -> None:
    asked = options("single-line")
    problems = load_problems(asked, humaneval, [])
    scores = means(run(Writes(problems, written), problems, asked, "prefix-only"), "prefix-only")
    names = ("pass", "pass_first_line", "exact", "exact_first_line", "stops")
    for name, value in zip(names, expected, strict=True):
        if value is not None:
            assert scores[name] == value, name


def test_verdicts_say_why_a_program_failed(humaneval: Path) -> None:
    asked = options("multi-line")
    problems = load_problems(asked, humaneval, [])
    model = Writes(problems, lambda hole: ended("    raise SystemExit\n"))
    report = run(model, problems, asked, "prefix-only")
    assert report.isolation in ("namespaces", "audit-hook")
    assert "raised SystemExit" in {outcome.verdict for outcome in report.outcomes["prefix-only"]}
    assert "pass_first_line" not in report.outcomes["prefix-only"][0].scores


def test_scores_of_held_out_holes() -> None:
    problem = Problem(
        id="a", task="subtoken", group="a", prefix="pri", hole="nt(x)", suffix="\n", word_rest="nt"
    )
    right = score_answer(problem, ended("nt(x)  "))
    assert right.pop("empty") == 0
    assert set(right.values()) == {1.0}
    assert set(right) == {"exact", "similarity", "stops", "exact_first_line", "subtoken"}
    runs_on = score_answer(problem, Answer("nt(x)\nprint(y)", ended=True))
    assert (runs_on["exact"], runs_on["exact_first_line"], runs_on["stops"]) == (0, 1, 0)
    assert (
        score_answer(problem, ended("nt(x)\n"))["stops"] == 0
    )  # the line break is not in the hole
    assert score_answer(problem, ended("ntly(x)"))["subtoken"] == 0


def test_empty_answers_are_right_where_nothing_is_missing() -> None:
    complete = Problem(id="a", task="nothing", group="a", prefix="x = 1", hole="", suffix="\n")
    assert score_answer(complete, ended("")) == {"empty": 1, "stops": 1}
    assert score_answer(complete, ended(" \n ")) == {"empty": 1, "stops": 1}
    assert score_answer(complete, Answer(" + 2", ended=False)) == {"empty": 0, "stops": 0}
    tasks: tuple[Task, ...] = ("line", "subtoken", "random-span")
    for task in tasks:
        hole = msgspec.structs.replace(complete, task=task, hole="1")
        assert score_answer(hole, ended("  "))["empty"] == 1
        assert score_answer(hole, ended("2"))["empty"] == 0
        assert score_answer(msgspec.structs.replace(hole, hole=" "), ended(""))["empty"] == 0


def test_missing_data_is_reported(humaneval: Path) -> None:
    with pytest.raises(MidfillError, match="task random-span needs --humaneval FOLDER"):
        load_problems(options("random-span"), None, [HERE])
    with pytest.raises(MidfillError, match="task line needs --files"):
        load_problems(options("line"), humaneval, [])
    with pytest.raises(MidfillError, match="--tasks names lines; there are single-line, "):
        parse_tasks("line,lines")


@pytest.fixture(scope="module")
def local(tiny_folder: Path) -> Iterator[LocalModel]:
    with LLM(str(tiny_folder), threads=1, kv_memory=8 * 2**20) as llm:
        yield LocalModel(llm, "tiny")


def test_a_model_is_asked_every_hole_in_every_condition(local: LocalModel, humaneval: Path) -> None:
    asked = options("single-line", "line", "subtoken", "block", "span", limit=4, typed=True)
    problems = load_problems(asked, humaneval, [HERE])
    saved: list[int] = []
    heard: list[tuple[str, int, int]] = []
    conditions = choose_conditions(None, local.format)
    report = evaluate(
        local,
        problems,
        conditions,
        asked,
        lambda *told: heard.append(told),
        lambda so_far: saved.append(len(so_far.problems)),
    )
    assert list(report.outcomes) == [condition.name for condition in CONDITIONS]
    assert len(problems) == 20
    for outcomes in report.outcomes.values():
        assert len(outcomes) == 20
        assert all(outcome.scores for outcome in outcomes)
    assert saved == [4, 8, 12, 16, 20]
    counts = [done for _, done, _ in heard]
    assert counts == sorted(set(counts))  # equal prompts are counted when the first is asked
    assert heard[-1] == ("span", 140, 140)
    assert report.problems[0].digest == problems[0].digest
    again = run(local, problems, asked)
    assert again == report


def test_an_interrupted_run_is_resumed_where_it_stopped(
    local: LocalModel, humaneval: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midfill_lab.evaluation.evaluate._BATCH_ANSWERS", 6)
    asked = options("single-line", "line", limit=5)
    problems = load_problems(asked, humaneval, [HERE])
    conditions = choose_conditions(["psm", "auto"], local.format)
    path = tmp_path / "run.json"

    def save(so_far: InfillingReport) -> None:
        write_report(so_far, path, finished=False)
        if len(so_far.problems) > 5:
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        evaluate(local, problems, conditions, asked, lambda *_: None, save)
    interrupted = read_report(path)
    assert 5 < len(interrupted.problems) < 10
    heard: list[tuple[int, int]] = []
    resumed = evaluate(
        local,
        problems,
        conditions,
        asked,
        lambda _, done, total: heard.append((done, total)),
        lambda _: None,
        interrupted,
    )
    assert heard[0] == (2 * len(read_report(path).problems) + 1, 20)
    assert resumed == run(local, problems, asked, "psm,auto")
    again: list[object] = []
    finished = evaluate(
        local, problems, conditions, asked, lambda *told: again.append(told), again.append, resumed
    )
    assert finished == resumed
    assert not again


def test_another_run_is_not_resumed(local: LocalModel, humaneval: Path) -> None:
    asked = options("line", limit=3)
    problems = load_problems(asked, humaneval, [HERE])
    earlier = run(local, problems, asked, "psm")

    def resume(names: str = "psm", asked: RunOptions = asked, **changes: object) -> None:
        evaluate(
            local,
            load_problems(asked, humaneval, [HERE]),
            choose_conditions(names.split(","), local.format),
            asked,
            lambda *_: None,
            lambda _: None,
            msgspec.structs.replace(earlier, **changes),
        )

    resume()
    with pytest.raises(MidfillError, match="its conditions differ"):
        resume("psm,efim")
    with pytest.raises(MidfillError, match="its options differ"):
        resume(asked=options("line", limit=4))
    with pytest.raises(MidfillError, match="its model's weights differ"):
        resume(fingerprint="other")
    other = [msgspec.structs.replace(problem, digest="x") for problem in earlier.problems]
    with pytest.raises(MidfillError, match="its holes are of other files"):
        resume(problems=other)


def test_a_server_gives_the_answers_of_the_model_itself(
    local: LocalModel, tiny_folder: Path
) -> None:
    asked = options("line", "span", limit=5)
    problems = load_problems(asked, None, [HERE])
    names = "prefix-only,psm,spm,efim"
    here = run(local, problems, asked, names)
    with start(tiny_folder, "--kv-memory", "8MB") as server:
        there = run(RemoteModel(f"{server.url}/v1", SENTINELS), problems, asked, names)
        auto = run(RemoteModel(f"{server.url}/v1", None), problems, asked)
        assert list(auto.outcomes) == ["prefix-only", "auto"]
        with pytest.raises(MidfillError, match="efim needs the model's FIM tokens"):
            run(RemoteModel(f"{server.url}/v1", None), problems, asked, "efim")
        unknown = RemoteModel(f"{server.url}/v1", None)
        unknown._name = "another"
        with pytest.raises(MidfillError, match=r"answered 404: .*another"):
            run(unknown, problems, asked, "prefix-only")
    ids = [problem.id for problem in here.problems]
    shared = [ids.index(problem.id) for problem in there.problems]
    assert len(shared) >= 8  # those that spell a sentinel are left out
    for name in names.split(","):
        pairs = [
            (here.outcomes[name][place], outcome)
            for place, outcome in zip(shared, there.outcomes[name], strict=True)
        ]
        # A server ends answers at the model's end tokens; here FIM tokens end them, too.
        whole = [(mine, theirs) for mine, theirs in pairs if not mine.ended]
        assert len(whole) >= 4
        assert all(mine == theirs for mine, theirs in whole), name


def test_a_missing_server_is_reported() -> None:
    with pytest.raises(MidfillError, match=r"no OpenAI-style server at http://127\.0\.0\.1:1/v1"):
        RemoteModel("http://127.0.0.1:1/v1", None)
    with pytest.raises(MidfillError, match="no OpenAI-style server at nonsense"):
        RemoteModel("nonsense", None)


def test_equal_prompts_are_asked_once() -> None:
    """Several distances cut a short prefix at the same place."""
    asked: list[ModelPrompt] = []

    class Counts(Writes):
        format = FimFormat("test", Sentinel("<P>", 0), Sentinel("<S>", 1), Sentinel("<M>", 2))

        def answer(
            self, prompts: Sequence[ModelPrompt], max_tokens: int, progress: StageProgress
        ) -> list[Answer]:
            asked.extend(prompts)
            return [ended(str(number)) for number in range(len(prompts))]

    problem = Problem(
        id="a", task="line", group="a", prefix="one\ntwo\npri", hole="nt", suffix="\n"
    )
    distances = [
        Condition(str(least), "distance", healing=True, least_increment=least)
        for least in (2, 3, 400, 800)
    ]
    report = evaluate(
        Counts([], ended), [problem], distances, options("line"), lambda *_: None, lambda _: None
    )
    assert len(asked) == len(set(asked)) == 2
    answers = [report.outcomes[str(least)][0].answer for least in (2, 3, 400, 800)]
    assert answers == ["0", "0", "1", "1"]
