"""README.md, CONTRIBUTING.md and docs/ are true: what they link to and name exists."""

import re
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT

FOLDERS = ("src", "lab", "benchmarks", "tests", "examples", "docs")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
SOURCE_FILE = re.compile(r"`([\w/.-]*\w\.py)`")

pytestmark = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """What a Git host calls the page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(text)
    }


def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text("utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_the_site_has_it(page: Path) -> None:
    if page.parent == ROOT / "docs":
        settings = (ROOT / "mkdocs.yml").read_text("utf-8")
        entries = re.findall(rf"[-:] {re.escape(page.name)}\n", settings)
        assert len(entries) == 1, "name it once in mkdocs.yml, in nav"


def test_source_files_that_are_named_exist(page: Path) -> None:
    files = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for name in SOURCE_FILE.findall(page.read_text("utf-8")):
        if not re.search("NAME|KIND", name):  # a file to be written
            assert any(file.endswith(f"/{name}") for file in files), f"{page.name}: no {name}"
