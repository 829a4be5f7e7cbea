"""HumanEval-Infilling's files: read, sampled, and refused in one line if broken."""

import gzip
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill_lab.evaluation.problems import load_humaneval, sample_problems
from midfill_lab.evaluation.sandbox.pool import Sandbox

NAME = "HumanEval-SingleLineInfilling.jsonl.gz"


def test_problems_are_read_from_the_file(humaneval: Path, records: list[dict[str, str]]) -> None:
    problems = load_humaneval(humaneval, "single-line")
    assert [problem.id for problem in problems] == [record["task_id"] for record in records]
    assert {problem.group for problem in problems} == {"HumanEval/0", "HumanEval/1"}
    assert problems[0].hole == records[0]["canonical_solution"]
    assert all(problem.task == "single-line" for problem in problems)


def test_reference_solutions_pass_and_others_fail(humaneval: Path) -> None:
    problems = load_humaneval(humaneval, "single-line")
    programs = [problem.program(problem.hole) for problem in problems]
    programs += [problem.program("    pass\n") for problem in problems]
    with Sandbox(2) as sandbox:
        passed = [verdict.passed for verdict in sandbox.run(programs)]
    assert passed == [True] * len(problems) + [False] * len(problems)


def test_samples_depend_on_the_seed_and_keep_their_order(humaneval: Path) -> None:
    problems = load_humaneval(humaneval, "single-line") * 30
    some = sample_problems(problems, 10, seed=1)
    assert len(some) == 10
    assert some == sample_problems(problems, 10, seed=1) != sample_problems(problems, 10, seed=2)
    assert (
        sample_problems(problems, 0, seed=1) == sample_problems(problems, 10**6, seed=1) == problems
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"not gzip", "can't be read"),
        (gzip.compress(b"not json", mtime=0), "can't be read"),
        (gzip.compress(b"x" * 10**4, mtime=0)[:-20], "can't be read"),
        (gzip.compress(b'{"task_id": "a"}\n', mtime=0), "something other than problems: KeyError"),
        (gzip.compress(b"[]\n", mtime=0), "something other than problems"),
        (gzip.compress(b"", mtime=0), "no problems"),
    ],
)
def test_a_broken_file_is_reported(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(MidfillError, match=problem):
        load_humaneval(tmp_path, "single-line")


def test_missing_files_say_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match=r"github\.com/openai/human-eval-infilling"):
        load_humaneval(tmp_path, "multi-line")
