"""Problem: a text with a hole, and the text that was there.

Problems are cut out of files (``holes``) or those of HumanEval-Infilling: holes in the HumanEval
programs, with the programs' own tests. Source: Bavarian et al., "Efficient Training of Language
Models to Fill in the Middle", 2022, arXiv 2207.14255; the data (MIT licence) is the ``data`` folder
of OpenAI's repository human-eval-infilling. The holes are single lines, runs of lines, and random
spans of characters of the 164 reference solutions.
"""

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from midfill.errors import MidfillError, OptionError
from midfill.infill.context_files import ContextFile
from midfill_lab.evaluation.sandbox.pool import Program

PublicTask = Literal["single-line", "multi-line", "random-span"]
FileTask = Literal["line", "subtoken", "block", "span", "nothing"]
MissingTask = Literal["missing-line", "missing-code", "missing-rest"]
NothingTask = Literal["nothing-end", "nothing-blank", "nothing-start"]
CaretTask = Literal[MissingTask, NothingTask]
Task = Literal[PublicTask, FileTask, CaretTask]
PUBLIC_TASKS: tuple[PublicTask, ...] = get_args(PublicTask)
FILE_TASKS: tuple[FileTask, ...] = get_args(FileTask)
CARET_TASKS: tuple[CaretTask, ...] = (*get_args(MissingTask), *get_args(NothingTask))
"""Carets in Python files at which it is clear whether something is missing."""
EMPTY_TASKS: tuple[Task, ...] = ("nothing", *get_args(NothingTask))
"""Tasks whose holes are empty."""
LINE_TASKS: tuple[Task, ...] = ("single-line", "line", "subtoken", *get_args(MissingTask))
"""Tasks whose holes end where their line ends."""
HOLE_TASKS: tuple[Task, ...] = (*PUBLIC_TASKS, "line", "subtoken", "block", "span")
"""Tasks whose holes are cut where users have them."""

_DEFAULT_MAX_TOKENS: dict[Task, int] = {
    "multi-line": 256,
    "random-span": 128,
    "block": 128,
    "span": 128,
}
_DEFAULT_MAX_LINE_TOKENS = 64


class ProblemTest(msgspec.Struct, frozen=True):
    """The test of a completed program; see ``Program``.

    Attributes:
        source: Python source that defines ``check``.
        entry_point: name of the function that ``check`` is called with.
    """

    source: str
    entry_point: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A hole in a text.

    Attributes:
        id: unique in a run, and the same in every run.
        task: its kind.
        group: the function or file it is from; problems of a group are not independent.
        prefix, hole, suffix: the complete text.
        word_rest: in a ``subtoken`` task, the rest of the caret's word.
        test: for a HumanEval problem.
        snippets: other text that the user has seen, the oldest first; often none.
    """

    id: str
    task: Task
    group: str
    prefix: str
    hole: str
    suffix: str
    word_rest: str = ""
    test: ProblemTest | None = None
    snippets: tuple[ContextFile, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the text, to check that two runs mean the same problem by an id."""
        snippets = (part for file in self.snippets for part in (file.path, file.text))
        text = "\0".join((self.prefix, self.hole, self.suffix, *snippets))
        return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

    def program(self, answer: str) -> Program:
        """Return the text with an answer in its hole, and its test.

        Raises:
            ValueError: the problem has no test.
        """
        if self.test is None:
            raise ValueError(f"{self.id} has no test")
        return Program(
            source=f"{self.prefix}{answer}{self.suffix}",
            entry_point=self.test.entry_point,
            test=self.test.source,
            reference=f"{self.prefix}{self.hole}{self.suffix}",
        )


def max_tokens(task: Task, chosen: int | None = None) -> int:
    """Return the maximum tokens of an answer: the chosen number, else the task's default."""
    return chosen or _DEFAULT_MAX_TOKENS.get(task, _DEFAULT_MAX_LINE_TOKENS)


def check_file_tasks(tasks: Iterable[Task], reason: str) -> None:
    """Check that all tasks are about files.

    Raises:
        MidfillError: one is not; the message gives the reason.
    """
    for task in tasks:
        if task not in FILE_TASKS:
            raise MidfillError(f"task {task}: {reason}")


def sample_problems(problems: Sequence[Problem], limit: int, seed: int) -> list[Problem]:
    """Return a random sample of ``limit`` problems in their own order; all if ``limit`` is 0."""
    if not limit or limit >= len(problems):
        return list(problems)
    indices = random.Random(f"{seed}/choose").sample(range(len(problems)), limit)
    return [problems[index] for index in sorted(indices)]


def parse_tasks(text: str) -> tuple[Task, ...]:
    """Parse names of tasks, separated by commas.

    Raises:
        MidfillError: an unknown name, or none.
    """
    known: tuple[Task, ...] = get_args(Task)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = ", ".join(unknown) or "nothing"
        raise OptionError(f"--tasks names {what}; there are {', '.join(known)}")
    return tuple(task for task in known if task in names)


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
