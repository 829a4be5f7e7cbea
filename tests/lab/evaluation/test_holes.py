"""Held-out holes: the form of every kind, spread over the files, the same for a seed."""

import keyword
import re
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill_lab.evaluation.holes import draw_holes
from midfill_lab.evaluation.problems import FILE_TASKS, FileTask, Problem
from midfill_lab.evaluation.source_files import SourceFile, read_files

HERE = Path(__file__).parent
FILES = read_files([HERE])
TEXTS = {file.name: file.text for file in FILES}


@pytest.fixture(params=FILE_TASKS)
def task(request: pytest.FixtureRequest) -> FileTask:
    chosen: FileTask = request.param
    return chosen


def holes(task: FileTask, count: int = 150, seed: int = 0) -> list[Problem]:
    return draw_holes(FILES, task, count, seed)


def test_a_hole_is_cut_from_its_file(task: FileTask) -> None:
    for problem in holes(task):
        assert problem.prefix + problem.hole + problem.suffix == TEXTS[problem.group]
        assert problem.task == task
        assert bool(problem.hole.strip()) == (task != "nothing")
        assert problem.prefix


def test_holes_differ_and_the_seed_decides(task: FileTask) -> None:
    found = holes(task)
    assert len(found) == len({problem.id for problem in found}) == 150
    assert found == holes(task)
    assert found != holes(task, seed=1)
    assert len({problem.group for problem in found}) == len(FILES)
    assert len({problem.group for problem in found[: len(FILES)]}) >= len(FILES) - 1


def test_the_holes_of_a_file_do_not_depend_on_other_files(task: FileTask) -> None:
    """Other files change how many holes are drawn from a file, not which."""
    few = draw_holes(FILES[:2], task, 60, 0)
    alone = {problem.id for problem in few if problem.group == FILES[0].name}
    among = {problem.id for problem in holes(task, 60) if problem.group == FILES[0].name}
    assert among
    assert among <= alone


def test_lines_and_subtokens_end_with_their_line() -> None:
    for problem in (*holes("line"), *holes("subtoken")):
        assert "\n" not in problem.hole
        assert problem.suffix[:1] in ("\n", "")
    assert any(problem.prefix[-1] != " " for problem in holes("line"))


def test_a_subtoken_caret_is_strictly_inside_a_word() -> None:
    for problem in holes("subtoken"):
        start = re.search(r"\w+$", problem.prefix)
        rest = re.match(r"\w+", problem.hole)
        assert start is not None
        assert rest is not None
        assert rest[0] == problem.word_rest
        word = start[0] + rest[0]
        assert word.isidentifier() or keyword.iskeyword(word)
        assert len(word) >= 4


def test_subtokens_are_of_code_and_not_of_strings_or_comments() -> None:
    text = '"""A docstring of some words."""\n' + "# a comment with words\nvalue = 'string'\n" * 20
    for problem in draw_holes([SourceFile("a.py", text)], "subtoken", 30, 0):
        assert problem.prefix.rsplit("\n", 1)[1] in ("v", "va", "val", "valu")


def test_blocks_are_a_few_lines_of_code() -> None:
    for problem in holes("block"):
        assert 1 <= problem.hole.count("\n") < 10
        assert not problem.prefix.rsplit("\n", 1)[1].strip()
        assert problem.suffix[:1] in ("\n", "")


def test_spans_are_short_and_start_anywhere() -> None:
    found = holes("span")
    assert all(4 <= len(problem.hole) <= 160 for problem in found)
    assert {bool(re.match(r"\w", problem.hole)) for problem in found} == {True, False}


def test_nothing_is_missing_where_statements_end_and_on_blank_lines() -> None:
    found = holes("nothing")
    for problem in found:
        assert problem.hole == ""
        assert problem.suffix.startswith("\n")
    last_signs = {problem.prefix[-1] for problem in found}
    assert "\n" in last_signs
    assert ")" in last_signs
    assert not last_signs & {":", ",", "("}


def test_a_file_with_syntax_errors_still_has_lines() -> None:
    files = [SourceFile("a.py", "def ((( broken 'text\n" * 40)]
    assert len(draw_holes(files, "line", 10, 0)) == 10


def test_there_are_fewer_holes_if_the_files_have_no_more() -> None:
    files = [SourceFile("a.py", "ab = 1\n\n\n\n\n\n\n\n\n" * 50)]
    found = draw_holes(files, "line", 10**5, 0)
    assert 50 < len(found) <= 300


def test_bad_input_is_reported_in_one_line() -> None:
    with pytest.raises(MidfillError, match="no place for a hole of kind 'subtoken'"):
        draw_holes([SourceFile("a.py", "x = 1\n" * 100)], "subtoken", 5, 0)
