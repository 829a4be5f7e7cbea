"""Holes in held-out files: cut at random out of Python sources that a model hasn't seen.

Four kinds, by where the caret is:

* ``line``: at a random character of a line's code; the hole extends to the line's end.
* ``subtoken``: strictly inside an identifier or keyword of at least four characters, not in a
  string or comment; the hole extends to the line's end.
* ``block``: where a line's code starts; the hole is that line and one to four more.
* ``span``: anywhere; the hole is 4 to 160 characters long.
"""

import io
import random
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from midfill.errors import MidfillError
from midfill.evaluation.problems import FileTask, Problem

MIN_FILE_CHARACTERS = 400
"""Shorter files have too little context around a hole."""

_MAX_LINE_CHARACTERS = 160
_BLOCK_LINES = (2, 5)
_SPAN_CHARACTERS = (4, 160)
_MIN_WORD_CHARACTERS = 4
_MAX_ATTEMPTS = 20  # per file and hole


@dataclass(frozen=True)
class SourceFile:
    """A file to cut holes into.

    Attributes:
        name: its path relative to the parent of the folder that the user named.
        text: its text with LF line ends.
    """

    name: str
    text: str


@dataclass(frozen=True)
class _Cut:
    """The hole text[start:end]; ``word_end`` is the end of the caret's word, or start."""

    start: int
    end: int
    word_end: int


def read_files(paths: Sequence[Path]) -> list[SourceFile]:
    """Read files and the Python files in folders, each folder's sorted by name.

    Files that are not UTF-8 or shorter than ``MIN_FILE_CHARACTERS`` are skipped.

    Raises:
        MidfillError: a path doesn't exist, or no usable file is left.
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
            if len(text) >= MIN_FILE_CHARACTERS and "\0" not in text:
                name = file.relative_to(root).as_posix()
                within = f"{path.resolve().name}/" if path.is_dir() else ""
                files.append(SourceFile(within + name, text))
    if not found:
        raise MidfillError(f"no Python files in {', '.join(map(str, paths))}")
    if not files:
        raise MidfillError(
            f"none of the {found} files in {', '.join(map(str, paths))} is a text of at least"
            f" {MIN_FILE_CHARACTERS} characters"
        )
    return files


def draw_holes(files: Sequence[SourceFile], task: FileTask, count: int, seed: int) -> list[Problem]:
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
        self._lines: list[tuple[int, int]] | None = None
        self._words: list[tuple[int, int]] | None = None

    def draw(self, task: FileTask, taken: dict[str, Problem]) -> Problem | None:
        """Draw a hole that is not among ``taken``; return None if none is found."""
        draws: dict[FileTask, Callable[[], _Cut | None]] = {
            "line": self._draw_line,
            "subtoken": self._draw_subtoken,
            "block": self._draw_block,
            "span": self._draw_span,
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
        start, end = self._rng.choice(lines)
        caret = self._rng.randrange(start, end)
        return _Cut(caret, end, caret)

    def _draw_subtoken(self) -> _Cut | None:
        if not (words := self._code_words()):
            return None
        start, end = self._rng.choice(words)
        caret = self._rng.randrange(start + 1, end)
        line_end = self._file.text.find("\n", end)
        return _Cut(caret, line_end if line_end >= 0 else len(self._file.text), end)

    def _draw_block(self) -> _Cut | None:
        lines = self._code_lines()
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

    def _code_lines(self) -> list[tuple[int, int]]:
        """Return start and end of each line's code, without blank and very long lines."""
        if self._lines is None:
            self._lines = list(_find_lines(self._file.text))
        return self._lines

    def _code_words(self) -> list[tuple[int, int]]:
        if self._words is None:
            self._words = list(_find_words(self._file.text))
        return self._words


def _find_lines(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for line in text.split("\n"):
        code = line.strip()
        if code and len(line) <= _MAX_LINE_CHARACTERS:
            begin = start + line.index(code[0])
            yield begin, start + len(line)
        start += len(line) + 1


def _find_words(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each long enough identifier or keyword, up to a syntax error."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
            if token.type == tokenize.NAME and len(token.string) >= _MIN_WORD_CHARACTERS:
                begin = starts[token.start[0] - 1] + token.start[1]
                if text.startswith(token.string, begin):  # a form feed can shift columns
                    yield begin, begin + len(token.string)
    except (tokenize.TokenError, SyntaxError):
        return
