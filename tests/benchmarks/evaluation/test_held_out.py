"""Held-out packages: pinned, apart from what adapters are trained on, fetched where they belong."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.evaluation import held_out
from benchmarks.evaluation.held_out import LISTS, fetch_held_out
from benchmarks.package_sources import Package, read_requirements


def names(paths: Sequence[Path]) -> set[str]:
    return {
        package.folder_name.removesuffix(f"-{package.version.replace(':', '-')}")
        for path in paths
        for package in read_requirements(path)
    }


def test_training_reads_none_of_the_packages() -> None:
    trained_on = names([*LISTS.parent.glob("*.txt")])
    assert len(trained_on) > 3000
    kept_apart = names([*LISTS.glob("*.txt")])
    assert len(kept_apart) == 41
    assert not kept_apart & trained_on


def test_each_language_gets_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[Sequence[Package], Path, Sequence[str]]] = []
    monkeypatch.setattr(
        held_out,
        "fetch_packages",
        lambda packages, folder, suffixes, progress: fetched.append((packages, folder, suffixes)),
    )
    fetch_held_out(tmp_path, lambda *_: None)
    python, javascript, *others = fetched
    assert (len(python[0]), python[1:]) == (10, (tmp_path / "python", (".py",)))
    assert (len(javascript[0]), javascript[1:]) == (5, (tmp_path / "javascript", (".js",)))
    assert [folder.name for _, folder, _ in others] == ["typescript", "go", "rust", "c"]
