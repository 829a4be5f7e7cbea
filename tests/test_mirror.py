"""Tests stand where the code is: their folders mirror the code's, and so do files named alike."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCES = {".": TESTS.parent / "src" / "midfill", "benchmarks": TESTS.parent / "benchmarks"}
APART = {"docs", "fuzz", "helpers"}
"""Folders that mirror no code."""

MODULES = {
    (Path(place) / path.relative_to(root)).with_suffix("")
    for place, root in SOURCES.items()
    for path in root.rglob("*.py")
}
FILES = [
    path.relative_to(TESTS)
    for path in sorted(TESTS.rglob("test_*.py"))
    if path.relative_to(TESTS).parts[0] not in APART
]


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=str)
def test_a_folder_of_tests_mirrors_one_of_code(folder: Path) -> None:
    assert any(module.parent == folder for module in MODULES)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_named_like_a_module_is_beside_its_mirror_image(file: Path) -> None:
    name = file.stem.removeprefix("test_")
    named = {module for module in MODULES if module.name == name}
    if file.parent / name in named:
        return
    door = file.parts[0]
    misplaced = [module for module in named if module.parts[0] == door and len(file.parts) > 1]
    assert not misplaced, f"{file} tests {misplaced[0]}.py, by its name"
