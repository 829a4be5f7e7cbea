"""Carets in Python files at which it is clear whether something is missing.

Something is missing, and the file shows it (``shows_gap``):

* ``missing-line``: in column 0; the hole is a line with its line break.
* ``missing-code``: after a line's indentation; the hole is the rest of the line.
* ``missing-rest``: inside a line's code; the hole is the rest of the line.

Nothing is missing, and the hole is empty:

* ``nothing-end``: at the end of a complete statement's line.
* ``nothing-blank``: on a blank line before a function or class.
* ``nothing-start``: in column 0 of a statement's line that follows a complete statement.

Much text can be taken out of a file without a trace: a statement among others, a comment, the end
of a line that would do without it. Where such text is missing, no answer is wrong, least of all
none. A gap shows if without the text

* the file is no Python: a bracket stays open, a block has no body, a line is unfinished, or
* near the gap, a name or an attribute of ``self`` is used that the file sets nowhere any more.

It is judged by the file's syntax alone. A gap that shows to nobody but a careful reader, such as
a missing ``return``, is not found.
"""

import ast
import random
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache

from midfill_lab.evaluation.problems import CaretTask
from midfill_lab.evaluation.source_files import SourceFile, Span

_DEFINITION = re.compile(r"\n[\n ]*(?:async def|def|class) |\n[\n ]*@")


def draw_caret(file: SourceFile, task: CaretTask, rng: random.Random) -> Span | None:
    """Draw the start and end of a hole of one kind; None where the draw has none."""
    if task in ("nothing-end", "nothing-blank", "nothing-start"):
        places = list(_complete_places(file, task))
        caret = rng.choice(places) if places else None
        return None if caret is None else (caret, caret)
    if not file.code_lines:
        return None
    start, end = rng.choice(file.code_lines)
    line = file.text.rfind("\n", 0, start) + 1
    if task == "missing-line":
        start, end = line, end + 1
    elif task == "missing-rest":
        start = rng.randrange(start, end)
    elif start == line:
        return None
    return (start, end) if shows_gap(file.text, start, end) else None


def _complete_places(file: SourceFile, task: CaretTask) -> Iterator[int]:
    ends, blanks = file.complete_places
    if task == "nothing-end":
        yield from ends
    elif task == "nothing-blank":
        yield from (place for place in blanks if _DEFINITION.match(file.text, place))
    else:
        yield from (end + 1 for end in ends if file.text[end + 1 : end + 2] not in ("", "\n"))


REACH = 1000
"""Characters on either side of a gap in which the use of a name shows it."""


def shows_gap(text: str, start: int, end: int) -> bool:
    """Return whether a Python file shows that text[start:end] is missing from it.

    It never does if the whole file can't be parsed.
    """
    complete = _unset_names(text)
    if complete is None:
        return False
    left = text[:start] + text[end:]
    found = _used_names(left)
    if found is None:
        return True
    first = left.count("\n", 0, max(0, start - REACH)) + 1
    last = left.count("\n", 0, start + REACH) + 1
    uses, bound = found
    return any(
        first <= line <= last and name not in bound and name not in complete for name, line in uses
    )


@lru_cache(maxsize=8)  # holes are drawn from the files in turn
def _unset_names(text: str) -> frozenset[str] | None:
    """Return the names that a file uses and doesn't set; None if it can't be parsed."""
    found = _used_names(text)
    if found is None:
        return None
    uses, bound = found
    return frozenset(name for name, _ in uses if name not in bound)


def _used_names(text: str) -> tuple[list[tuple[str, int]], set[str]] | None:
    """Return (name, line) of the names that a file uses, and all names that it sets.

    Attributes of ``self`` are names that begin with a dot. None if it can't be parsed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its escape sequences
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    uses: list[tuple[str, int]] = []
    bound: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                uses.append((name, node.lineno))
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Load()):
                uses.append((f".{name}", node.lineno))
            case _:
                bound.update(_set_names(node))
    if "*" in bound:  # what a module exports can be any name
        uses = [(name, line) for name, line in uses if name.startswith(".")]
    return uses, bound


def _set_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that one node sets."""
    match node:
        case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.ClassDef(name=name):
            yield name
            yield from (f".{member}" for member in _members(node))
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield f".{name}"
        case ast.alias(name=name, asname=short):
            yield short or name.partition(".")[0]
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            yield from names
        case _:
            return


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names that a class's own body sets."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        else:
            names = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
            yield from (name.id for name in names if isinstance(name.ctx, ast.Store))
