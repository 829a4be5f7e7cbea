"""Carets whose line goes on with a name that is known only from far away."""

import pytest

from midfill.infill.window import WindowRule
from midfill_lab.evaluation.far_carets import FarCarets
from midfill_lab.evaluation.source_files import SourceFile

NEAR = WindowRule(100, 50)
"""It shows at most 200 characters before the caret and 50 after it."""
FILLER = "count = 0\n"
SETS = "def distant_name():\n    pass\n"
USES = "value = distant_name()\n"


def places(text: str, kind: str = "far", *others: SourceFile) -> list[tuple[str, int]]:
    """The names of a file's carets, and how far away they are."""
    file = SourceFile("package/file.py", text)
    drawn = FarCarets([file, *others], NEAR).draw(file, kind, 9, seed=0)  # type: ignore[arg-type]
    for caret in drawn:
        problem = caret.problem
        assert problem.prefix + problem.hole + problem.suffix == text
        assert problem.hole.startswith(caret.name)
        assert "\n" not in problem.hole
    return [(caret.name, caret.distance) for caret in drawn]


def test_a_name_counts_from_where_it_stands_last() -> None:
    text = SETS + 30 * FILLER + USES
    assert places(text) == [("distant_name", len(SETS + 30 * FILLER + "value = ") - 4)]


@pytest.mark.parametrize(("lines", "is_far"), [(16, False), (17, True)])
def test_what_the_window_may_show_is_not_far(lines: int, is_far: bool) -> None:
    text = SETS + lines * FILLER + USES
    assert ("distant_name" in dict(places(text))) == is_far
    assert (text.index(USES) + len("value = ") - len("def ") > NEAR.farthest) == is_far


@pytest.mark.parametrize(("lines", "is_far"), [(4, False), (5, True)])
def test_so_it_is_below_the_caret(lines: int, is_far: bool) -> None:
    text = SETS + 30 * FILLER + USES + lines * FILLER + "other = distant_name\n"
    first = [name for name, distance in places(text) if distance > 300]
    assert (first == ["distant_name"]) == is_far


def test_names_that_are_only_mentioned_or_set_below_are_not_far() -> None:
    assert not places("# distant_name\n" + 30 * FILLER + USES)
    assert not places('"distant_name"\n' + 30 * FILLER + USES + SETS)
    assert not places("distant_name()\n" + 30 * FILLER + USES)


def test_names_in_strings_and_comments_are_none() -> None:
    assert not places(SETS + 30 * FILLER + "value = 'distant_name'  # distant_name\n")


def test_attributes_are_names_without_their_dot() -> None:
    text = "class Box:\n    def __init__(self):\n        self.contents = 1\n"
    found = places(text + 30 * FILLER + "value = box.contents\n")
    assert [name for name, _ in found] == ["contents"]


@pytest.mark.parametrize(
    "statement",
    ["from package.other import thing", "import package.other", "from .other import thing",
     "from . import other", "from other import thing"],
)  # fmt: skip
def test_an_imported_file_sets_names_that_the_own_one_lacks(statement: str) -> None:
    other = SourceFile("package/other.py", "class Things:\n    def first_thing(self): ...\n")
    text = f"{statement}\n{FILLER}value = thing.first_thing()\n"
    file = SourceFile("package/file.py", text)
    assert places(text, "imported", other) == [("first_thing", 0)]
    (caret,) = FarCarets([file, other], NEAR).draw(file, "imported", 9, 0)
    assert [shown.path for shown in caret.files] == ["package/other.py"]
    assert [shown.text for shown in caret.files] == [other.text]


def test_a_name_that_the_own_file_has_is_not_imported() -> None:
    other = SourceFile("package/other.py", "def first_thing(): ...\n")
    text = "from .other import first_thing\n" + 30 * FILLER + "value = first_thing()\n"
    assert not places(text, "imported", other)
    assert not places("import json\nvalue = first_thing()\n", "imported", other)


def test_a_path_that_two_files_end_with_names_neither() -> None:
    text = "from other import thing\nvalue = thing.first_thing()\n"
    others = [SourceFile(f"{name}/other.py", "def first_thing(): ...\n") for name in "ab"]
    assert not places(text, "imported", *others)


def test_carets_of_any_lines_are_anywhere_in_them() -> None:
    file = SourceFile("file.py", 200 * FILLER)
    drawn = FarCarets([file], NEAR).draw(file, "any", 100, seed=0)
    assert len({caret.problem.hole for caret in drawn}) == len(FILLER) - 1
    assert len({caret.problem.prefix.count("\n") for caret in drawn}) == 100
    assert FarCarets([file], NEAR).count_lines(file) == {"far": 0, "imported": 0, "any": 199}


def test_the_draw_follows_from_the_seed() -> None:
    file = SourceFile("file.py", 200 * FILLER)
    carets = FarCarets([file], NEAR)
    assert carets.draw(file, "any", 5, 0) == carets.draw(file, "any", 5, 0)
    assert carets.draw(file, "any", 5, 0) != carets.draw(file, "any", 5, 1)


def test_a_file_that_is_no_python_has_no_names() -> None:
    assert not places("def (:\n" + SETS + 30 * FILLER + USES)


def test_imports_and_names_that_every_file_has_dont_count() -> None:
    assert not places(SETS + 30 * FILLER + "import distant_name\n")
    assert not places("def __enter__(): ...\n" + 30 * FILLER + "value = __enter__()\n")
