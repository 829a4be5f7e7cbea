"""The tests that SECURITY.md and the threat model name exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from doc_blocks import ROOT

PAGES = (ROOT / "SECURITY.md", ROOT / "docs" / "design" / "threats.md")
NAMED = re.compile(r"`(tests/[\w/.]+)(?:::(\w+))?`")


@cache
def defined_in(path: Path) -> set[str]:
    """Return the names of a file's tests."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in nodes if isinstance(node, kinds)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_holds_a_promise_exists(page: Path) -> None:
    named = NAMED.findall(page.read_text("utf-8"))
    assert len(named) > 10
    for path, test in named:
        assert (ROOT / path).exists(), path
        assert not test or test in defined_in(ROOT / path), f"{path}::{test}"


def test_every_promise_of_the_threat_model_names_a_test() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", PAGES[1].read_text("utf-8"), re.MULTILINE)
    promises = [row for row in rows if row[0] not in ("promise", "---")]
    assert len(promises) > 20
    for promise, held_by in promises:
        assert "::test_" in held_by, promise
