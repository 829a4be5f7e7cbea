"""Holes in held-out files: random character cuts of Python sources that a model hasn't seen.

Four kinds. The caret stands after a line's indentation or further right, where people type:

* ``line``: at a random character of a line; the hole goes to the line's end.
* ``subtoken``: strictly inside an identifier or keyword of four characters or more, and no string
  or comment; the hole goes to the line's end.
* ``block``: where a line's code begins; the hole is that line and one to four more.
* ``span``: anywhere; the hole is 4 to 160 characters.
"""

import io
import random
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from midfill.errors import MidfillError
from midfill.evaluation.problems import FileTask, Problem

SHORTEST_FILE = 400
"""Characters; a shorter file shows too little around a hole."""

_LONGEST_LINE = 160
_LINES = (2, 5)
_SPAN = (4, 160)
_SHORTEST_WORD = 4
_TRIES = 20  # draws in one file before the next one is tried


@dataclass(frozen=True)
class SourceFile:
    """A file to cut holes into.

    Attributes:
        name: its path from, and with, the folder the user named.
        text: its text, line breaks as "\\n".
    """

    name: str
    text: str


@dataclass(frozen=True)
class _Cut:
    """The hole text[start:end]; ``word_end`` is where the caret's word ends, start if in none."""

    start: int
    end: int
    word_end: int


def read_files(paths: Sequence[Path]) -> list[SourceFile]:
    """The Python files among ``paths`` and in the folders among them, in order of their names.

    Files that are no UTF-8 text or shorter than ``SHORTEST_FILE`` are passed over.

    Raises:
        MidfillError: a path doesn't exist, or no file is left.
    """
    files: list[SourceFile] = []
    found = 0
    for path in paths:
        if not path.exists():
            raise MidfillError(f"--files {path}: no such file or folder")
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        root = path if path.is_dir() else path.parent
        for file in inside:
            if not file.is_file():
                continue
            found += 1
            try:
                text = file.read_text("utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if len(text) >= SHORTEST_FILE and "\0" not in text:
                name = file.relative_to(root).as_posix()
                within = f"{path.resolve().name}/" if path.is_dir() else ""
                files.append(SourceFile(within + name, text))
    if not found:
        raise MidfillError(f"no Python files in {', '.join(map(str, paths))}")
    if not files:
        raise MidfillError(
            f"none of the {found} files in {', '.join(map(str, paths))} is a text of at least"
            f" {SHORTEST_FILE} characters"
        )
    return files


def cut_holes(files: Sequence[SourceFile], task: FileTask, count: int, seed: int) -> list[Problem]:
    """Up to ``count`` holes of one kind, spread over the files; all chance follows from the seed.

    Files take turns; less than ``count`` come back where they hold no more different ones.

    Raises:
        MidfillError: there is not one such hole.
    """
    order = list(files)
    random.Random(f"{seed}/files").shuffle(order)
    sources = [_Source(file, random.Random(f"{seed}/{task}/{file.name}")) for file in order]
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
        raise MidfillError(f"the files hold no place for a hole of kind {task!r}")
    return sorted(problems.values(), key=lambda problem: problem.id)


class _Source:
    """A file that holes are drawn from."""

    def __init__(self, file: SourceFile, chance: random.Random) -> None:
        self._file = file
        self._chance = chance
        self._lines: list[tuple[int, int]] | None = None
        self._words: list[tuple[int, int]] | None = None

    def draw(self, task: FileTask, taken: dict[str, Problem]) -> Problem | None:
        """A hole that is not taken; None if none is found."""
        draw: Callable[[], _Cut | None] = getattr(self, f"_draw_{task}")
        text = self._file.text
        for _ in range(_TRIES):
            cut = draw()
            if cut is None:
                continue
            hole = text[cut.start : cut.end]
            row = text.count("\n", 0, cut.start) + 1
            column = cut.start - text.rfind("\n", 0, cut.start)
            name = f"{task}/{self._file.name}:{row}:{column}+{len(hole)}"
            if name in taken or not hole.strip() or not cut.start:
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
        if not (lines := self._code_lines()):
            return None
        start, end = self._chance.choice(lines)
        caret = self._chance.randrange(start, end)
        return _Cut(caret, end, caret)

    def _draw_subtoken(self) -> _Cut | None:
        if not (words := self._code_words()):
            return None
        start, end = self._chance.choice(words)
        caret = self._chance.randrange(start + 1, end)
        line_end = self._file.text.find("\n", end)
        return _Cut(caret, line_end if line_end >= 0 else len(self._file.text), end)

    def _draw_block(self) -> _Cut | None:
        lines = self._code_lines()
        count = self._chance.randint(*_LINES)
        if len(lines) < count:
            return None
        first = self._chance.randrange(len(lines) - count + 1)
        start, end = lines[first][0], lines[first + count - 1][1]
        # Longer lines and gaps may lie between: a few lines, no more.
        few = self._file.text.count("\n", start, end) < 2 * count
        return _Cut(start, end, start) if few else None

    def _draw_span(self) -> _Cut | None:
        length = self._chance.randint(*_SPAN)
        start = self._chance.randrange(len(self._file.text) - length)
        return _Cut(start, start + length, start)

    def _code_lines(self) -> list[tuple[int, int]]:
        """Where each line's code begins and ends; blank and very long lines left out."""
        if self._lines is None:
            self._lines = list(_lines(self._file.text))
        return self._lines

    def _code_words(self) -> list[tuple[int, int]]:
        if self._words is None:
            self._words = list(_words(self._file.text))
        return self._words


def _lines(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for line in text.split("\n"):
        code = line.strip()
        if code and len(line) <= _LONGEST_LINE:
            begin = start + line.index(code[0])
            yield begin, start + len(line)
        start += len(line) + 1


def _words(text: str) -> Iterator[tuple[int, int]]:
    """Where each long enough identifier or keyword begins and ends; none after a syntax error."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
            if token.type == tokenize.NAME and len(token.string) >= _SHORTEST_WORD:
                begin = starts[token.start[0] - 1] + token.start[1]
                if text.startswith(token.string, begin):  # a form feed can shift columns
                    yield begin, begin + len(token.string)
    except (tokenize.TokenError, SyntaxError):
        return
