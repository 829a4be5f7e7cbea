"""Held-out packages: pinned, apart from what adapters are trained on, fetched where they belong."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.evaluation import held_out
from benchmarks.evaluation.held_out import fetch_held_out
from benchmarks.package_sources import Package, read_requirements

RECIPES = Path(__file__).parents[3] / "recipes"


def names(path: Path) -> set[str]:
    return {package.folder_name.rpartition("-")[0] for package in read_requirements(path)}


def test_training_reads_none_of_the_packages() -> None:
    lists = list(RECIPES.glob("*/held_out.txt"))
    assert lists
    for path in lists:
        trained_on = names(path.with_name("packages.txt"))
        assert len(trained_on) > 10
        assert len(names(path)) == 10
        assert not names(path) & trained_on


def test_each_language_gets_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[Sequence[Package], Path, Sequence[str]]] = []
    monkeypatch.setattr(
        held_out,
        "fetch_packages",
        lambda packages, folder, suffixes, progress: fetched.append((packages, folder, suffixes)),
    )
    folders = fetch_held_out(tmp_path, lambda *_: None)
    assert folders == (tmp_path / "python", tmp_path / "javascript")
    python, javascript = fetched
    assert (len(python[0]), python[1:]) == (10, (folders[0], (".py",)))
    assert (len(javascript[0]), javascript[1:]) == (6, (folders[1], (".js",)))
