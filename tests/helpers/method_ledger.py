"""The ledger of published methods: what each is to do, and the test that holds it or why none does.

Run as a program, it writes the ledger into docs/methods-ledger.md.
"""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from midfill.engine.scheduling.registry import POLICIES
from midfill.methods.registry import METHODS
from midfill_lab.reporting import ResultTable, replace_section

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "methods" / "ledger.toml"
PAGE = ROOT / "docs" / "methods-ledger.md"
SECTION = "ledger"


@dataclass(frozen=True)
class Check:
    """One check of a method.

    Attributes:
        says: what holds.
        test: the test that fails where it doesn't, "path::name" or "path::Class::name"; or
        reason: why there is none.
    """

    says: str
    test: str | None = None
    reason: str | None = None

    @classmethod
    def parse(cls, name: str, entry: dict[str, Any]) -> "Check":
        """Return the check that an entry of the file describes.

        Raises:
            ValueError: it has other fields than ``check`` and one of ``test`` and ``reason``, or
                one of them is no text.
        """
        if set(entry) not in ({"check", "test"}, {"check", "reason"}):
            raise ValueError(f"{name}: write check, and test or reason, not {sorted(entry)}")
        if not all(isinstance(value, str) and value.strip() for value in entry.values()):
            raise ValueError(f"{name}: {entry} has a field that is no text")
        return cls(entry["check"], entry.get("test"), entry.get("reason"))


@dataclass(frozen=True)
class FoundTest:
    """A test in a file.

    Attributes:
        marks: names of the marks of pytest on it, its class and its module.
    """

    marks: frozenset[str]

    @property
    def never_runs(self) -> bool:
        """Whether it is skipped whatever the circumstances, or may fail."""
        return bool(self.marks & {"skip", "xfail"})


def load(file: Path = FILE) -> dict[str, tuple[Check, ...]]:
    """Return the checks of each method, in the order of the file.

    Raises:
        ValueError: see ``Check.parse``.
    """
    tables = tomllib.loads(file.read_text("utf-8"))
    return {
        name: tuple(Check.parse(name, entry) for entry in entries)
        for name, entries in tables.items()
        if name != "titles"
    }


def titles(file: Path = FILE) -> dict[str, str]:
    """Return what methods and policies are called, by name; the file has those of the others."""
    others: dict[str, str] = tomllib.loads(file.read_text("utf-8"))["titles"]
    methods = {name: entry.title for name, entry in METHODS.items()}
    policies = {name: f"{name}: {entry.title}" for name, entry in POLICIES.items()}
    return methods | policies | others


def find_test(node_id: str) -> FoundTest | None:
    """Return the test of "path::name" or "path::Class::name"; None if there is none."""
    path, *names = node_id.split("::")
    if not names or not names[-1].startswith("test_") or not (ROOT / path).is_file():
        return None
    body: list[ast.stmt] = _statements(path)
    marks = set(_module_marks(body))
    for place, name in enumerate(names):
        kind = ast.FunctionDef if place == len(names) - 1 else ast.ClassDef
        node = next(
            (one for one in body if isinstance(one, kind) and one.name == name),
            None,
        )
        if node is None:
            return None
        marks |= {mark for each in node.decorator_list for mark in _marks(each)}
        body = node.body
    return FoundTest(frozenset(marks))


@cache
def _statements(path: str) -> list[ast.stmt]:
    return ast.parse((ROOT / path).read_text("utf-8")).body


def _module_marks(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the marks that ``pytestmark`` puts on all tests of a module."""
    for node in body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
        ):
            yield from _marks(node.value)


def _marks(node: ast.AST) -> Iterator[str]:
    """Yield the names after ``pytest.mark`` in an expression."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "pytest.mark":
            yield each.attr


def render() -> str:
    """Return the ledger as it stands in the documentation."""
    ledger, called = load(), titles()
    everything = [one for checks in ledger.values() for one in checks]
    held = sum(one.test is not None for one in everything)
    tables = (
        f"## {called[name]}\n\n{ResultTable(rows=[_row(one) for one in checks]).markdown()}"
        for name, checks in ledger.items()
    )
    summary = f"{held} of {len(everything)} checks are held by tests."
    return "\n\n".join((summary, *tables))


def _row(check: Check) -> dict[str, str]:
    if check.test is None:
        return {"check": check.says, "held by": f"no test: {check.reason}"}
    path, _, name = check.test.partition("::")
    found = find_test(check.test)
    marks = () if found is None else found.marks
    mark = next((f" ({each})" for each in ("quality", "slow") if each in marks), "")
    return {"check": check.says, "held by": f"`{name}` in `{path}`{mark}"}


if __name__ == "__main__":
    replace_section(PAGE, SECTION, render())
