"""Chunks of other text that an editor plugin would show the model beside a hole.

llama.vim and llama.vscode keep a ring of 16 chunks of 32 lines: what the user has seen, of the same
file and of others. Here the user has visited places at random, half of them in the hole's own file
(not near the caret, which the prompt shows anyway), the others in three files of the same
repository that are nearest in the tree. So the ring is one of a session without direction; chunks
that are chosen for what they have in common with the text at the caret show what a better choice
would be worth.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import msgspec

from midfill.errors import OptionError
from midfill.infill.context_files import ContextFile, newest
from midfill.lab.evaluation.problems import Problem
from midfill.lab.evaluation.source_files import SourceFile

_RING = 16  # chunks
_LINES, _LEAST_LINES = 32, 3  # of a chunk
_SHOWN_BEFORE, _SHOWN_AFTER = 64, 32  # lines around the caret that chunks leave out
_FILES = 3
_OWN = 0.5  # share of chunks from the hole's own file
_ATTEMPTS = 200
_NEAR_BEFORE, _NEAR_AFTER = 1200, 600  # characters that chunks are compared with
_WORD = re.compile(r"[^\W\d]\w{2,}")

SnippetChoice = Literal["newest", "alike", "old", "answer"]
"""Which chunks are shown: the newest of the ring; those of all visits that have most words in
common with the text around the caret; the ring as it was before all of these came; those that
have most words in common with what is missing, which no editor knows."""

CHOICES: tuple[SnippetChoice, ...] = ("newest", "alike", "old", "answer")


@dataclass(frozen=True, slots=True)
class ShownSnippets:
    """Which chunks a condition shows.

    Attributes:
        characters: at most so many, see ``infill.context_files.newest``.
        choice: which.
        behind: show them after the suffix instead of before everything else.
    """

    characters: int
    choice: SnippetChoice = "newest"
    behind: bool = False

    @property
    def name(self) -> str:
        """How tables and options spell it."""
        choice = "" if self.choice == "newest" else f"/{self.choice}"
        return f"{self.characters}{choice}{'/behind' if self.behind else ''}"


def parse_snippets(text: str) -> tuple[ShownSnippets, ...]:
    """Parse a list such as "0,1000,2000,2000/old,2000/behind"; each is kept once.

    Raises:
        MidfillError: it is something else, or names fewer than two numbers of newest chunks.
    """
    shown = [_parse_one(part.strip()) for part in text.split(",")]
    if len({one for one in shown if is_plain(one)}) < 2:
        raise OptionError("--snippets names fewer than two numbers to choose from, as 0,2000 does")
    return tuple(dict.fromkeys(sorted(shown, key=lambda one: (not is_plain(one), one.characters))))


def is_plain(shown: ShownSnippets) -> bool:
    """Return whether it shows what the server would: the newest chunks before everything else."""
    return shown.choice == "newest" and not shown.behind


def _parse_one(part: str) -> ShownSnippets:
    number, *words = part.split("/")
    choices = [one for one in CHOICES if one in words]
    rest = [word for word in words if word not in CHOICES and word != "behind"]
    if not (number.isascii() and number.isdigit()) or rest or len(choices) > 1:
        raise OptionError(
            "--snippets takes numbers of characters, each with one of /alike, /old and /answer or"
            f" /behind if wanted, like 0,1000,2000/old, not {part!r}"
        )
    choice = choices[0] if choices else "newest"
    return ShownSnippets(int(number), choice, behind="behind" in words)


def with_snippets(
    problems: Sequence[Problem], files: Sequence[SourceFile], seed: int
) -> list[Problem]:
    """Return the problems with the chunks that a user has visited, the oldest first.

    There are up to twice as many as a ring holds. All randomness follows from the seed and the
    hole, so that every model gets the same chunks.

    Args:
        problems: holes of these files.
        files: all files of the run.
        seed: of all chance.
    """
    drawn = []
    for problem in problems:
        chance = random.Random(f"{seed}/chunks/{problem.id}")
        drawn.append(msgspec.structs.replace(problem, snippets=_visits(problem, files, chance)))
    return drawn


def shown_snippets(problem: Problem, shown: ShownSnippets) -> tuple[ContextFile, ...]:
    """Return the chunks that a condition shows, the most important one last."""
    chunks = problem.snippets
    middle = max(len(chunks) - _RING, len(chunks) // 2)
    if shown.choice == "newest":
        chunks = chunks[middle:]
    elif shown.choice == "old":
        chunks = chunks[:middle]
    else:
        near = problem.prefix[-_NEAR_BEFORE:] + problem.suffix[:_NEAR_AFTER]
        wanted = _words(problem.hole if shown.choice == "answer" else near)
        chunks = tuple(sorted(chunks, key=lambda chunk: _in_common(chunk.text, wanted)))
    return newest(chunks, shown.characters)


def _visits(
    problem: Problem, files: Sequence[SourceFile], chance: random.Random
) -> tuple[ContextFile, ...]:
    own = (problem.prefix + problem.suffix).split("\n")
    caret = problem.prefix.count("\n")
    above, below = own[: max(0, caret - _SHOWN_BEFORE)], own[caret + _SHOWN_AFTER :]
    others = [(one.name, one.text.split("\n")) for one in _nearest(problem.group, files, chance)]
    visits: list[ContextFile] = []
    starts: dict[int, list[int]] = {}  # by text, where chunks of it start
    for _ in range(_ATTEMPTS):
        if len(visits) == 2 * _RING:
            break
        if chance.random() < _OWN or not others:
            name, lines = problem.group, chance.choice((above, below))
        else:
            name, lines = chance.choice(others)
        start = chance.randint(0, max(0, len(lines) - _LINES))
        seen = starts.setdefault(id(lines), [])
        if len(lines) < _LEAST_LINES or any(abs(start - one) < _LINES // 2 for one in seen):
            continue
        seen.append(start)
        text = "\n".join(lines[start : start + _LINES]) + "\n"
        visits.append(ContextFile(text, name.rpartition("/")[2]))
    return tuple(visits)


def _nearest(name: str, files: Sequence[SourceFile], chance: random.Random) -> list[SourceFile]:
    """Return other files that have most folders in common with one."""
    folders = name.split("/")[:-1]

    def shared(file: SourceFile) -> int:
        pairs = zip(folders, file.name.split("/")[:-1], strict=False)
        return next((place for place, (a, b) in enumerate(pairs) if a != b), len(folders))

    others = [file for file in files if file.name != name]
    chance.shuffle(others)
    return sorted(others, key=lambda file: -shared(file))[:_FILES]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text))


def _in_common(text: str, wanted: set[str]) -> float:
    """Return how many words a chunk and a text have in common, as a cosine but for a factor."""
    words = _words(text)
    return len(words & wanted) / sqrt(len(words) or 1)
