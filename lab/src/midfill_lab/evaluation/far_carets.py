"""Carets in Python files whose line goes on with a name that is known only from far away.

By what the rest of the line uses:

* ``far``: a name that the file sets above, and that stands nowhere near the caret.
* ``imported``: a name that the file has nowhere else, set by files that this one imports. Only
  these are shown, as if a planner knew which of the imported files are needed.
* ``any``: whatever the line has. These are the lines that users write, for comparison.

Near is what a window may show (``WindowRule.farthest`` before the caret, ``after`` after it), so
no prompt with that window has the name. The caret is where the name begins, for ``any`` anywhere in
the line. A name is what the file's syntax says is one, of at least four characters, in no string,
comment or import. Names like ``__init__``, which every file has, don't count.
"""

import ast
import random
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Literal, get_args

from midfill.infill.context_files import ContextFile
from midfill.infill.window import WindowRule
from midfill_lab.evaluation.problems import Problem
from midfill_lab.evaluation.source_files import SourceFile, Span

FarKind = Literal["far", "imported", "any"]
FAR_KINDS: tuple[FarKind, ...] = get_args(FarKind)


@dataclass(frozen=True)
class FarCaret:
    """A caret, and the name that its line goes on with.

    Attributes:
        kind: see above.
        problem: the hole, the rest of the line.
        name: the name; "" for ``any``.
        distance: characters from where it stands last to the caret; 0 where it stands nowhere.
        files: those that set it, in the order of their imports; for ``imported`` only.
    """

    kind: FarKind
    problem: Problem
    name: str = ""
    distance: int = 0
    files: tuple[ContextFile, ...] = ()


class FarCarets:
    """Finds the carets of some files.

    Args:
        files: all files of a run; those that others import are found among them.
        near: the window that doesn't show the names.
    """

    def __init__(self, files: Sequence[SourceFile], near: WindowRule) -> None:
        self._near = near
        self._files = {file.name: _Names(file) for file in files}

    def draw(self, file: SourceFile, kind: FarKind, count: int, seed: int) -> list[FarCaret]:
        """Draw at most so many carets of one kind, of different lines, by the place in the file."""
        chance = random.Random(f"{seed}/{kind}/{file.name}")
        places = list(self._places(file, kind))
        drawn = chance.sample(places, min(count, len(places)))
        if kind == "any":
            drawn = [(line, chance.randrange(*line), "", 0) for line, *_ in drawn]
        files = self._imported(file) if kind == "imported" else ()
        return [
            FarCaret(kind, _hole(file, line, place), name, distance, _that_set(name, files))
            for line, place, name, distance in sorted(drawn)
        ]

    def count_lines(self, file: SourceFile) -> dict[FarKind, int]:
        """Return how many of a file's lines have a place of each kind."""
        return {kind: len(list(self._places(file, kind))) for kind in FAR_KINDS}

    def _places(self, file: SourceFile, kind: FarKind) -> Iterator[tuple[Span, int, str, int]]:
        """Yield (line, where the name begins, name, distance), one per line at most."""
        if kind == "any":
            yield from ((line, line[0], "", 0) for line in file.code_lines if line[0])
            return
        names = self._files[file.name]
        if kind == "far":
            known = names.first_set
        else:
            known = {name: 0 for one in self._imported(file) for name in one.first_set}
        words = file.words
        for line in file.code_lines:
            if file.text.startswith(("import ", "from "), line[0]):
                continue
            first = bisect_left(words, line)
            for start, end in words[first : bisect_left(words, (line[1], 0))]:
                name = file.text[start:end]
                if known.get(name, line[0]) >= line[0] or end > line[1] or name[:2] == "__":
                    continue
                distance = self._distance(names, name, line, start)
                if distance is None or (distance == 0) != (kind == "imported"):
                    continue
                yield line, start, name, distance
                break

    def _distance(self, names: "_Names", name: str, line: Span, start: int) -> int | None:
        """Return how far above a name stands last, 0 if it stands nowhere; None if it is near."""
        places = names.places[name]
        above, below = bisect_left(places, start), bisect_left(places, line[1])
        distance = start - places[above - 1] if above else 0
        if 0 < distance <= self._near.farthest:
            return None
        is_below = below < len(places)
        if is_below and (not distance or places[below] - line[1] <= self._near.after):
            return None
        return distance

    def _imported(self, file: SourceFile) -> Sequence["_Names"]:
        """Return the files that one imports, of those that are known."""
        found: dict[str, _Names] = {}
        for module in self._files[file.name].imports:
            for name in (f"{module}.py", f"{module}/__init__.py"):
                for known in self._ending_with(name):
                    if known != file.name:
                        found[known] = self._files[known]
        return list(found.values())

    def _ending_with(self, path: str) -> list[str]:
        if path in self._files:
            return [path]
        # Absolute imports name paths within a folder that is on Python's path.
        return self._by_path.get(path, [])

    @cached_property
    def _by_path(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._files:
            parts = name.split("/")
            for place in range(1, len(parts)):
                found.setdefault("/".join(parts[place:]), []).append(name)
        return {path: names for path, names in found.items() if len(names) == 1}


class _Names:
    """The names of one file."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """Where each word of the file begins, strings and comments included."""
        found: dict[str, list[int]] = {}
        for match in re.finditer(r"[^\W\d]\w*", self.file.text):
            found.setdefault(match.group(), []).append(match.start())
        return found

    @cached_property
    def _tree(self) -> ast.Module | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about its escape sequences
                return ast.parse(self.file.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    @cached_property
    def first_set(self) -> dict[str, int]:
        """Where the first line begins that sets a name; nothing if the file can't be parsed."""
        starts = [0, *(match.end() for match in re.finditer("\n", self.file.text))]
        found: dict[str, int] = {}
        for node in ast.walk(self._tree) if self._tree is not None else ():
            name = _set_name(node)
            if name is not None:
                place = starts[node.lineno - 1]  # type: ignore[attr-defined]
                found[name] = min(place, found.get(name, place))
        return found

    @cached_property
    def imports(self) -> list[str]:
        """The modules that the file imports, as paths without an ending."""
        folder = PurePosixPath(self.file.name).parent
        found: list[str] = []
        for node in ast.walk(self._tree) if self._tree is not None else ():
            match node:
                case ast.Import(names=names):
                    found += [name.name.replace(".", "/") for name in names]
                case ast.ImportFrom(module=module, names=names, level=level):
                    path = (module or "").replace(".", "/")
                    if level:
                        parts = folder.parts[: len(folder.parts) - level + 1]
                        path = "/".join((*parts, path) if path else parts)
                    found += [path, *(f"{path}/{name.name}" for name in names)]
        return list(dict.fromkeys(found))


def _that_set(name: str, files: Sequence[_Names]) -> tuple[ContextFile, ...]:
    return tuple(
        ContextFile(names.file.text, names.file.name) for names in files if name in names.first_set
    )


def _set_name(node: ast.AST) -> str | None:
    """Return the name that a definition or an assignment sets, an attribute's without its dot."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case _:
            return None


def _hole(file: SourceFile, line: Span, caret: int) -> Problem:
    """Return the rest of a line from the caret on."""
    text, end = file.text, line[1]
    row = text.count("\n", 0, caret) + 1
    column = caret - text.rfind("\n", 0, caret)
    return Problem(
        id=f"{file.name}:{row}:{column}",
        task="line",
        group=file.name,
        prefix=text[:caret],
        hole=text[caret:end],
        suffix=text[end:],
    )
