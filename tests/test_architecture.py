"""docs/architecture.md and CONTRIBUTING.md are true: the map is the package's, and what an addition
touches is where they say."""

import dataclasses
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from tiny_checkpoints import VARIANTS

from midfill.models.families import FAMILIES
from midfill.serving.server.app import DIALECTS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "midfill"
ARCHITECTURE, CONTRIBUTING = (
    (ROOT / name).read_text("utf-8") for name in ("docs/architecture.md", "CONTRIBUTING.md")
)


def table(page: str, title: str) -> dict[str, str]:
    """Return the table under a heading: its first column's cells, each with the rest of its row."""
    section = page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {first: rest for first, rest in rows[1:] if not first.startswith("---")}


def modules(folder: str) -> list[ModuleType]:
    """Import the modules of one folder of the package."""
    names = sorted(path.stem for path in (PACKAGE / folder).glob("*.py") if path.stem[0] != "_")
    return [importlib.import_module(f"midfill.{folder.replace('/', '.')}.{n}") for n in names]


def test_the_map_has_every_folder_of_the_package() -> None:
    drawn = {
        cell.strip("`").split("/")[0] for cell in table(ARCHITECTURE, "The map") if "/" in cell
    }
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert drawn == folders


ADDITIONS = [
    *table(ARCHITECTURE, "Where to add what").items(),
    *table(CONTRIBUTING, "What each kind of addition touches").items(),
]
PLACES = [(what, place) for what, row in ADDITIONS for place in re.findall(r"`([^`]+)`", row)]
FILES = [(what, place) for what, place in PLACES if re.fullmatch(r"[\w/]+\.\w+", place)]


@pytest.mark.parametrize(("what", "file"), FILES, ids=[f"{what}: {f}" for what, f in FILES])
def test_files_to_be_touched_by_an_addition_exist(what: str, file: str) -> None:
    pattern = file.replace("NAME", "*").replace("KIND", "*")
    assert any(PACKAGE.glob(pattern)) or any(ROOT.glob(pattern)), f"{what}: no {file}"


def test_the_additions_name_files() -> None:
    assert len(ADDITIONS) >= 16
    assert {what for what, _ in FILES} == {what for what, _ in ADDITIONS}


def test_every_family_is_listed_and_has_a_tiny_checkpoint() -> None:
    written = {module.FAMILY.name for module in modules("models") if hasattr(module, "FAMILY")}
    assert set(FAMILIES) == written
    assert {variant.family for variant in VARIANTS.values()} == written


@pytest.mark.parametrize("page", ["README.md", "docs/models.md"])
def test_pages_list_every_family(page: str) -> None:
    text = (ROOT / page).read_text("utf-8").lower().replace(" ", "").replace("-", "")
    assert [name for name in FAMILIES if name.replace("-", "") not in text] == []


def test_policies_are_frozen_dataclasses() -> None:
    for module in modules("engine/scheduling/policies"):
        defined = [
            item
            for item in vars(module).values()
            if isinstance(item, type) and item.__module__ == module.__name__
        ]
        assert defined
        for kind in defined:
            if dataclasses.is_dataclass(kind):
                assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]


def test_every_dialect_is_mounted() -> None:
    written = [
        module.DIALECT
        for module in modules("serving/server/dialects")
        if hasattr(module, "DIALECT")
    ]
    assert len(written) >= 3
    assert {id(dialect) for dialect in written} == {id(dialect) for dialect in DIALECTS}
