"""Carets in Python files at which it is clear whether something is missing.

Something is missing, and the file shows it (``gaps``):

* ``missing-line``: in column 0; the hole is a line with its line break.
* ``missing-code``: after a line's indentation; the hole is the rest of the line.
* ``missing-rest``: inside a line's code; the hole is the rest of the line.

Nothing is missing, and the hole is empty:

* ``nothing-end``: at the end of a complete statement's line.
* ``nothing-blank``: on a blank line before a function or class.
* ``nothing-start``: in column 0 of a statement's line that follows a complete statement.
"""

import random
import re
from collections.abc import Iterator

from midfill.lab.evaluation.gaps import shows_gap
from midfill.lab.evaluation.problems import CaretTask
from midfill.lab.evaluation.source_files import SourceFile, Span

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
