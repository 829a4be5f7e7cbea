"""Carets at which it is clear whether something is missing."""

import ast
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill_lab.evaluation.carets import REACH, shows_gap
from midfill_lab.evaluation.holes import draw_holes
from midfill_lab.evaluation.problems import CARET_TASKS, EMPTY_TASKS, CaretTask, Problem
from midfill_lab.evaluation.source_files import SourceFile, read_files

FILES = read_files([Path(__file__).parent])
TEXTS = {file.name: file.text for file in FILES}


def carets(task: CaretTask, count: int = 40) -> list[Problem]:
    return draw_holes(FILES, task, count, 0)


@pytest.mark.parametrize("task", CARET_TASKS)
def test_a_caret_is_in_its_file_and_the_seed_decides(task: CaretTask) -> None:
    found = carets(task)
    assert found == carets(task)
    assert len({problem.id for problem in found}) == 40
    for problem in found:
        assert problem.prefix + problem.hole + problem.suffix == TEXTS[problem.group]
        assert (problem.hole == "") == (task in EMPTY_TASKS) == task.startswith("nothing")
        start = len(problem.prefix)
        if problem.hole:
            assert shows_gap(TEXTS[problem.group], start, start + len(problem.hole))


def test_a_missing_line_is_whole_and_its_caret_in_column_0() -> None:
    for problem in carets("missing-line"):
        assert problem.prefix.endswith("\n")
        assert problem.hole.count("\n") == 1
        assert problem.hole.endswith("\n")


def test_missing_code_leaves_the_indentation() -> None:
    for problem in carets("missing-code"):
        indentation = problem.prefix.rpartition("\n")[2]
        assert indentation
        assert not indentation.strip()
        assert problem.hole == problem.hole.strip()
        assert problem.suffix[:1] in ("", "\n")


def test_a_missing_rest_ends_with_its_line() -> None:
    found = carets("missing-rest")
    assert all("\n" not in problem.hole for problem in found)
    assert all(problem.suffix[:1] in ("", "\n") for problem in found)
    assert len({problem.prefix[-1].isalnum() for problem in found}) == 2


def test_nothing_is_missing_at_the_end_of_a_statement() -> None:
    for problem in carets("nothing-end"):
        assert problem.suffix.startswith("\n")
        assert problem.prefix[-1] not in ":,(\n"


def test_nothing_is_missing_between_functions() -> None:
    for problem in carets("nothing-blank"):
        assert problem.prefix.endswith("\n")
        assert problem.suffix.startswith("\n")
        follows = problem.suffix.lstrip("\n").split(maxsplit=1)[0]
        assert follows in ("def", "class", "async") or follows.startswith("@")


def test_nothing_is_missing_before_a_statement_that_follows_a_complete_one() -> None:
    for problem in carets("nothing-start"):
        assert problem.prefix.endswith("\n")
        assert problem.prefix[-2] not in ":,(\n"
        assert problem.suffix[0] != "\n"
        ast.parse(problem.prefix + "\n" + problem.suffix)


def test_a_text_without_such_places_is_reported() -> None:
    prose = [SourceFile("a.py", "words and words\n" * 40)]
    with pytest.raises(MidfillError, match="no place for a hole of kind 'missing-line'"):
        draw_holes(prose, "missing-line", 5, 0)
    plain = [SourceFile("a.py", "x = 1\n" * 40)]
    with pytest.raises(MidfillError, match="no place for a hole of kind 'nothing-blank'"):
        draw_holes(plain, "nothing-blank", 5, 0)


FILE = '''\
"""A docstring of the file."""

import os
import sys as system


class Reader(Base):
    limit = 3

    def __init__(self, path, *, sep=","):
        self.path = path
        self.sep = sep
        self.unused = 0

    def read(self):
        # A comment.
        with open(self.path) as file:
            for line in file:
                parts = line.split(self.sep)
                print(len(parts), os.sep)
        self.inherited()
        return parts[: self.limit] + undefined
'''


def shows(text: str, gap: str) -> bool:
    assert text.count(gap) == 1
    start = text.index(gap)
    return shows_gap(text, start, start + len(gap))


@pytest.mark.parametrize(
    "gap",
    [
        "class Reader(Base):\n",
        "            for line in file:\n",
        "):\n        self.path",
        "open(self.path) as file:",
        ".split(self.sep",
        '"""A docstring',
        "turn parts",
    ],
)
def test_it_shows_where_the_rest_is_no_python(gap: str) -> None:
    assert shows(FILE, gap)


@pytest.mark.parametrize(
    "gap",
    [
        "import os\n",
        "        self.path = path\n",
        "                parts = line.split(self.sep)\n",
        "    limit = 3\n",
        "th, *, sep",  # an unfinished word is a name that nothing sets
        "f.path) as",
    ],
)
def test_it_shows_where_a_name_is_set_nowhere_any_more(gap: str) -> None:
    assert shows(FILE, gap)


@pytest.mark.parametrize(
    "gap",
    [
        "        # A comment.\n",
        "    def read(self):\n",  # its lines then continue the function before
        "A docstring of the file.",
        "import sys as system\n",
        "        self.unused = 0\n",
        "                print(len(parts), os.sep)\n",
        "        self.inherited()\n",
        "        return parts[: self.limit] + undefined\n",
        " + undefined",
        ", os.sep",
    ],
)
def test_it_does_not_show_where_the_file_does_without(gap: str) -> None:
    assert not shows(FILE, gap)


def test_a_name_that_is_used_far_away_shows_nothing() -> None:
    far = "first = 1\n" + "other = 2\n" * (REACH // 10 + 2) + "print(first)\n"
    assert not shows(far, "first = 1\n")
    assert shows(far.replace("other = 2\n" * 9, ""), "first = 1\n")


def test_every_way_to_set_a_name_counts() -> None:
    uses = "print(value)\n"
    for other in (
        "value = 2", "value: int = 2", "for value in (): pass", "import value", "import value.sub",
        "from a import b as value", "def value(): pass", "class value: pass", "f = lambda value: 1",
        "def f(*value): pass", "with f() as value: pass", "(value := 2)", "global value",
        "try: f()\nexcept E as value: pass", "match f:\n    case [value]: pass",
        "match f:\n    case [*value]: pass", "match f:\n    case {**value}: pass",
        "match f:\n    case int() as value: pass", "del value",
    ):  # fmt: skip
        assert not shows(f"value = 1\n{other}\n{uses}", "value = 1\n"), other
    assert not shows(f"value = 1\nfrom os import *\n{uses}", "value = 1\n")


def test_what_cant_be_parsed_shows_nothing() -> None:
    assert not shows("value = (\nprint(value)\n", "value = (\n")
    assert not shows("value = 1\x00\nprint(value)\n", "value = 1\x00\n")
