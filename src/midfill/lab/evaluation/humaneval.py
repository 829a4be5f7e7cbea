"""HumanEval-Infilling: holes in the HumanEval programs, with the programs' own tests.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022,
arXiv 2207.14255; the data (MIT licence) is the ``data`` folder of OpenAI's repository
human-eval-infilling. The holes are single lines, runs of lines, and random spans of characters of
the 164 reference solutions.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midfill.errors import MidfillError
from midfill.lab.evaluation.problems import Problem, ProblemTest, PublicTask

_FILES: dict[PublicTask, str] = {
    "single-line": "HumanEval-SingleLineInfilling.jsonl.gz",
    "multi-line": "HumanEval-MultiLineInfilling.jsonl.gz",
    "random-span": "HumanEval-RandomSpanInfilling.jsonl.gz",
}
HOW_TO_GET_IT = (
    "get the 'data' folder of OpenAI's human-eval-infilling repository"
    " (https://github.com/openai/human-eval-infilling, MIT licence)"
)


def load_humaneval(folder: Path, task: PublicTask) -> list[Problem]:
    """Load all problems of one kind.

    Raises:
        MidfillError: the file is missing or broken.
    """
    path = folder / _FILES[task]
    if not path.is_file():
        raise MidfillError(f"no {_FILES[task]} in {folder}; {HOW_TO_GET_IT}")
    problems = [_problem(task, record, path) for record in _records(path)]
    if not problems:
        raise MidfillError(f"{path} holds no problems")
    return problems


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, EOFError, ValueError) as error:
        raise MidfillError(f"{path} can't be read: {error}; {HOW_TO_GET_IT}") from None


def _problem(task: PublicTask, record: dict[str, Any], path: Path) -> Problem:
    try:
        return Problem(
            id=record["task_id"],
            task=task,
            group="/".join(record["task_id"].split("/")[1:3]),  # .../HumanEval/17/L3
            prefix=record["prompt"],
            hole=record["canonical_solution"],
            suffix=record["suffix"],
            test=ProblemTest(record["test"], record["entry_point"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise MidfillError(f"{path} holds something other than problems: {error!r}") from None
