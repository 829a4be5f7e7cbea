"""Gaps: whether a file shows that a text is missing."""

import pytest

from midfill.lab.evaluation.gaps import REACH, shows_gap

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
