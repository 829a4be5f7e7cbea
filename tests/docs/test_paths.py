"""Files and folders that pages name are there."""

import re
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT

FOLDERS = ("benchmarks", "docs", "examples", "lab", "recipes", "src", "tests", "web")
SOURCES = [
    path.as_posix()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "node_modules" not in path.parts
]
ALL_PAGES = sorted({*PAGES, *ROOT.glob("*.md"), *ROOT.glob("*/*.md")} - {ROOT / "CHANGELOG.md"})
NAMED = re.compile(rf"`((?:(?:{'|'.join(FOLDERS)})/[\w./-]*)|(?:[\w/-]*\w\.py))`")


def named_in(page: Path) -> set[str]:
    """Return the paths in a page's sentences that begin at the root, and names of modules."""
    names = NAMED.findall(page.read_text("utf-8"))
    return {name for name in names if not re.search("NAME|KIND", name)}


def is_there(name: str) -> bool:
    there = (ROOT / name).exists()
    return there or any(source.endswith(f"/{name}") for source in SOURCES)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_in_sentences_exist(page: Path) -> None:
    assert [name for name in sorted(named_in(page)) if not is_there(name)] == []


def test_some_are_found() -> None:
    assert len(named_in(ROOT / "docs" / "architecture.md")) > 10
