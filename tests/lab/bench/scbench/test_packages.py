"""What is taken from installed packages, and what isn't."""

import ast
import textwrap

from midfill_lab.bench.scbench.packages import (
    Function,
    Passage,
    find_function,
    find_passage,
    find_sentences,
    read_packages,
)

DOCUMENTED = textwrap.dedent('''
    def area(width, height):
        """Return the area of a plain rectangle.

        It is measured in the units of the sides, squared, and is never negative. See also: >>> x
        """
        if width < 0 or height < 0:
            raise ValueError("negative side")
        return width * height
''')


def docstring(text: str) -> tuple[ast.AST, str]:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node, ast.get_docstring(node) or ""


def test_a_function_has_its_code_without_its_description() -> None:
    function = find_function(DOCUMENTED, *docstring(DOCUMENTED))
    assert function == Function(
        "Return the area of a plain rectangle.",
        "def area(width, height):\n    if width < 0 or height < 0:\n"
        '        raise ValueError("negative side")\n    return width * height',
    )
    ast.parse(function.code)
    blank = DOCUMENTED.replace("    return", "\n    return")
    assert find_function(blank, *docstring(blank)) is None, "a blank line would end an answer"


def test_a_passage_has_prose_behind_its_first_sentence() -> None:
    assert find_passage(docstring(DOCUMENTED)[1]) == Passage(
        "Return the area of a plain rectangle.",
        "It is measured in the units of the sides, squared, and is never negative.",
    )
    assert find_passage("Return the area of a plain rectangle.") is None
    assert (
        find_passage("Return the area of a rectangle.\n\nArgs:\n    width: of it, as it is.")
        is None
    )


def test_sections_about_arguments_are_no_sentences() -> None:
    text = "One sentence that is long enough to be used.\n\nArgs:\n    A side that is not negative."
    assert find_sentences(text) == ["One sentence that is long enough to be used."]


def test_packages_are_read_in_a_seeded_order() -> None:
    texts = read_packages(3, files=12)
    assert texts.source.startswith("numba ")
    assert read_packages.__wrapped__(3, files=12) == texts
    assert len(set(texts.sentences)) == len(texts.sentences) > 10
