"""Problem: a text with a hole, what stood there, and where one of its kind comes from."""

import random
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal, get_args

import msgspec

from midfill.errors import MidfillError

PublicTask = Literal["single-line", "multi-line", "random-span"]
FileTask = Literal["line", "subtoken", "block", "span"]
Task = Literal["single-line", "multi-line", "random-span", "line", "subtoken", "block", "span"]
PUBLIC_TASKS: tuple[PublicTask, ...] = get_args(PublicTask)
FILE_TASKS: tuple[FileTask, ...] = get_args(FileTask)
LINE_TASKS: tuple[Task, ...] = ("single-line", "line", "subtoken")
"""Tasks whose holes end where their line ends."""

_MAX_TOKENS: dict[Task, int] = {"multi-line": 256, "random-span": 128, "block": 128, "span": 128}
_MAX_LINE_TOKENS = 64


class ProblemTest(msgspec.Struct, frozen=True):
    """How a filled-in program is tested: its source, then this.

    Attributes:
        source: defines ``check``.
        entry_point: the function that ``check`` is called with.
    """

    source: str
    entry_point: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A hole in a text.

    Attributes:
        id: unique among all problems of a run, the same in every run.
        task: its kind.
        group: the function or file it was cut from; problems of a group are not independent.
        prefix, hole, suffix: the text, whole.
        word_rest: of a subtoken hole, what is left of the word that the caret stands in.
        test: of a HumanEval problem.
    """

    id: str
    task: Task
    group: str
    prefix: str
    hole: str
    suffix: str
    word_rest: str = ""
    test: ProblemTest | None = None

    @property
    def digest(self) -> str:
        """Tells whether two runs mean the same by an id."""
        text = "\0".join((self.prefix, self.hole, self.suffix))
        return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

    def program(self, answer: str) -> str:
        """The text with an answer in its hole, and its test.

        Raises:
            ValueError: it has no test.
        """
        if self.test is None:
            raise ValueError(f"{self.id} has no test")
        text = f"{self.prefix}{answer}{self.suffix}"
        return f"{text}\n{self.test.source}\ncheck({self.test.entry_point})\n"


def max_tokens(task: Task, chosen: int | None = None) -> int:
    """Longest answer to a problem of a kind, in tokens."""
    return chosen or _MAX_TOKENS.get(task, _MAX_LINE_TOKENS)


def choose(problems: Sequence[Problem], limit: int, seed: int) -> list[Problem]:
    """A seeded sample of at most ``limit`` problems in their own order; all if ``limit`` is 0."""
    if not limit or limit >= len(problems):
        return list(problems)
    places = random.Random(f"{seed}/choose").sample(range(len(problems)), limit)
    return [problems[place] for place in sorted(places)]


def parse_tasks(text: str) -> tuple[Task, ...]:
    """Tasks as named on the command line, separated by commas.

    Raises:
        MidfillError: an unknown name, or none.
    """
    known: tuple[Task, ...] = get_args(Task)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = ", ".join(unknown) or "nothing"
        raise MidfillError(f"--tasks names {what}; there are {', '.join(known)}")
    return tuple(task for task in known if task in names)
