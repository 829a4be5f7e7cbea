"""Carets at which it is clear whether something is missing."""

import ast
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.lab.evaluation.gaps import shows_gap
from midfill.lab.evaluation.holes import draw_holes
from midfill.lab.evaluation.problems import CARET_TASKS, EMPTY_TASKS, CaretTask, Problem
from midfill.lab.evaluation.source_files import SourceFile, read_files

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
