"""The pictures of docs/planner.md show what the planner does now."""

import re
import xml.etree.ElementTree as ElementTree
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from doc_blocks import ROOT

SPEC = spec_from_file_location("figures", ROOT / "docs/site/figures.py")
assert SPEC is not None
figures = module_from_spec(SPEC)
assert SPEC.loader is not None
SPEC.loader.exec_module(figures)


@pytest.mark.parametrize("name", figures.PICTURES)
def test_pictures_are_what_is_drawn(name: str) -> None:
    drawn = figures.PICTURES[name]()
    ElementTree.fromstring(drawn)
    committed = (ROOT / f"docs/figures/{name}.svg").read_text("utf-8")
    assert drawn == committed, "run: python docs/site/figures.py"


def test_the_page_tells_the_figures_of_its_picture() -> None:
    page = (ROOT / "docs/planner.md").read_text("utf-8")
    numbers = re.findall(r">([\d,]+)</text>", figures.PICTURES["cached"]())
    assert len(numbers) == 12
    for number in numbers:
        assert number in page or number == "0"
