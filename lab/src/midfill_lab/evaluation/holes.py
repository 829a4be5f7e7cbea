"""Holes in held-out files: cut at random out of sources that a model hasn't seen.

By where the caret is:

* ``line``: at a random character of a line's code; the hole extends to the line's end.
* ``subtoken``: strictly inside an identifier or keyword of at least four characters, not in a
  string or comment; the hole extends to the line's end.
* ``block``: where a line's code starts; the hole is that line and one to four more.
* ``span``: anywhere; the hole is 4 to 160 characters long.
* ``nothing``: where nothing is missing, at the end of a complete statement's line or on a blank
  line; the hole is empty.

``carets`` has further kinds.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from midfill.errors import MidfillError
from midfill_lab.evaluation.carets import draw_caret
from midfill_lab.evaluation.problems import (
    CARET_TASKS,
    EMPTY_TASKS,
    CaretTask,
    FileTask,
    Problem,
)
from midfill_lab.evaluation.source_files import SourceFile

_BLOCK_LINES = (2, 5)
_SPAN_CHARACTERS = (4, 160)
_MAX_ATTEMPTS = 20  # per file and hole


@dataclass(frozen=True)
class _Cut:
    """The hole text[start:end] of a document.

    Attributes:
        start, end: of the hole in the file.
        word_end: end of the caret's word, or start.
    """

    start: int
    end: int
    word_end: int


def draw_holes(
    files: Sequence[SourceFile], task: FileTask | CaretTask, count: int, seed: int
) -> list[Problem]:
    """Draw up to ``count`` different holes of one kind, from the files in turn.

    They are in the order they were drawn in, so the first ones are from as many files as possible.
    There are fewer if the files have no more. All randomness follows from the seed.

    Raises:
        MidfillError: the files have no such hole.
    """
    order = list(files)
    random.Random(f"{seed}/files").shuffle(order)
    sources = [_HoleSource(file, random.Random(f"{seed}/{task}/{file.name}")) for file in order]
    problems: dict[str, Problem] = {}
    while sources and len(problems) < count:
        left = []
        for source in sources:
            problem = source.draw(task, problems)
            if problem is None:
                continue
            problems[problem.id] = problem
            left.append(source)
            if len(problems) == count:
                break
        sources = left
    if not problems:
        raise MidfillError(f"the files have no place for a hole of kind {task!r}")
    return list(problems.values())


class _HoleSource:
    """A file that holes are drawn from."""

    def __init__(self, file: SourceFile, rng: random.Random) -> None:
        self._file = file
        self._rng = rng

    def draw(self, task: FileTask | CaretTask, taken: dict[str, Problem]) -> Problem | None:
        """Draw a hole that is not among ``taken``; return None if none is found."""
        draws: dict[FileTask | CaretTask, Callable[[], _Cut | None]] = {
            "line": self._draw_line,
            "subtoken": self._draw_subtoken,
            "block": self._draw_block,
            "span": self._draw_span,
            "nothing": self._draw_nothing,
            **{caret: partial(self._draw_caret, caret) for caret in CARET_TASKS},
        }
        text = self._file.text
        for _ in range(_MAX_ATTEMPTS):
            cut = draws[task]()
            if cut is None:
                continue
            hole = text[cut.start : cut.end]
            row = text.count("\n", 0, cut.start) + 1
            column = cut.start - text.rfind("\n", 0, cut.start)
            name = f"{task}/{self._file.name}:{row}:{column}+{len(hole)}"
            if name in taken or not cut.start or (task not in EMPTY_TASKS and not hole.strip()):
                continue
            return Problem(
                id=name,
                task=task,
                group=self._file.name,
                prefix=text[: cut.start],
                hole=hole,
                suffix=text[cut.end :],
                word_rest=text[cut.start : cut.word_end],
            )
        return None

    def _draw_line(self) -> _Cut | None:
        if not (lines := self._file.code_lines):
            return None
        start, end = self._rng.choice(lines)
        caret = self._rng.randrange(start, end)
        return _Cut(caret, end, caret)

    def _draw_subtoken(self) -> _Cut | None:
        if not (words := self._file.words):
            return None
        start, end = self._rng.choice(words)
        caret = self._rng.randrange(start + 1, end)
        return _Cut(caret, self._line_end(end), end)

    def _draw_block(self) -> _Cut | None:
        lines = self._file.code_lines
        count = self._rng.randint(*_BLOCK_LINES)
        if len(lines) < count:
            return None
        first = self._rng.randrange(len(lines) - count + 1)
        start, end = lines[first][0], lines[first + count - 1][1]
        # Very long and blank lines may lie between, but not many.
        few = self._file.text.count("\n", start, end) < 2 * count
        return _Cut(start, end, start) if few else None

    def _draw_span(self) -> _Cut | None:
        length = self._rng.randint(*_SPAN_CHARACTERS)
        start = self._rng.randrange(len(self._file.text) - length)
        return _Cut(start, start + length, start)

    def _draw_nothing(self) -> _Cut | None:
        places = self._rng.choice(self._file.complete_places)
        if not places:
            return None
        caret = self._rng.choice(places)
        return _Cut(caret, caret, caret)

    def _draw_caret(self, task: CaretTask) -> _Cut | None:
        hole = draw_caret(self._file, task, self._rng)
        return None if hole is None else _Cut(*hole, word_end=hole[0])

    def _line_end(self, position: int) -> int:
        end = self._file.text.find("\n", position)
        return end if end >= 0 else len(self._file.text)
