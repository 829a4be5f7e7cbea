"""The documentation site: builds without warnings, reads well, and needs nothing but its folder."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from playground_page import OpenedPage, open_browser

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs (make docs)"),
]

PARAGRAPH = re.compile(r"<(p|li)>((?:(?!</?(?:p|li|td|pre)>).)*?)</\1>", re.DOTALL)
RAW_MARKDOWN = re.compile(r"\n\s*(?:[-*|]|\d+\.) |\| --|\]\(|^\|")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a freshly built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [*command, folder], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


def articles(site: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, the article's HTML) of every page that is not a file's source."""
    for path in site.rglob("*.html"):
        name = path.relative_to(site).as_posix()
        if not name.startswith("source/") and name != "404.html":
            yield name, path.read_text("utf-8").split("<article", 1)[1].split("</article>")[0]


def test_every_list_and_table_is_rendered_as_one(site: Path) -> None:
    for name, article in articles(site):
        for found in PARAGRAPH.finditer(article):
            text = re.sub(r"<code>.*?</code>", "", found[2], flags=re.DOTALL)
            assert not RAW_MARKDOWN.search(text), f"{name}: {found[2]}"


def test_the_reference_holds_every_command_and_every_public_name(site: Path) -> None:
    import midfill

    pages = dict(articles(site))
    for command in ("midfill serve", "midfill bench rounds", "midfill eval cuts"):
        assert f"<code>{command}</code>" in pages["reference/cli.html"]
    for name in {*midfill.__all__} - {"__version__"}:
        assert f'id="midfill.{name}"' in pages["reference/python.html"]
    assert "fills in" in pages["index.html"]


def test_source_files_that_pages_link_to_are_pages(site: Path) -> None:
    reading = dict(articles(site))["reading.html"]
    targets = re.findall(r'href="(source/[^"#]+)"', reading)
    assert "source/src/midfill/infill/planner.py.html" in targets
    for target in targets:
        assert (site / target).is_file()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [800, 1280])
def test_pages_open_from_the_file_system_and_ask_nobody(
    site: Path, browser: Any, scheme: str, width: int
) -> None:
    for name in ("index", "planner", "server", "reference/python", "reference/cli", "editors"):
        options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
        page = OpenedPage(browser, f"file://{site}", f"/{name}.html", **options)
        page.wait_until("document.readyState === 'complete'")
        assert not page.complaints
        assert not page.elsewhere
        root = "document.documentElement"
        assert page.page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), name
        page.close()


def test_the_search_works_from_the_file_system(site: Path, browser: Any) -> None:
    page = OpenedPage(browser, f"file://{site}", "/index.html")
    page.page.click(".md-search__input")
    page.page.keyboard.type("snapkv")
    page.page.locator(".md-search-result a[href*='methods.html']").first.wait_for()
    assert not page.complaints
    assert not page.elsewhere
    page.close()
