"""Held-out packages: pinned, apart from what adapters are trained on, fetched where they belong."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from midfill.lab.evaluation import held_out_packages
from midfill.lab.evaluation.held_out_packages import JAVASCRIPT, PYTHON, fetch_held_out
from midfill.system.packages import Package, read_requirements

RECIPES = Path(__file__).parents[3] / "recipes"


def test_training_holds_out_the_same_packages_and_reads_none_of_them() -> None:
    lists = list(RECIPES.glob("*/held_out.txt"))
    assert lists
    for path in lists:
        assert set(read_requirements(path)) == set(PYTHON)
        trained_on = {
            package.folder_name.rpartition("-")[0]
            for package in read_requirements(path.with_name("packages.txt"))
        }
        assert len(trained_on) > 10
        held_out = {package.folder_name.rpartition("-")[0] for package in PYTHON}
        assert not held_out & trained_on


def test_each_language_gets_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[Sequence[Package], Path, Sequence[str]]] = []
    monkeypatch.setattr(
        held_out_packages,
        "fetch_packages",
        lambda packages, folder, suffixes, progress: fetched.append((packages, folder, suffixes)),
    )
    folders = fetch_held_out(tmp_path, lambda *_: None)
    assert folders == (tmp_path / "python", tmp_path / "javascript")
    assert fetched == [(PYTHON, folders[0], (".py",)), (JAVASCRIPT, folders[1], (".js",))]
