"""Copies of two versions: a commit and the working tree, side by side for a while."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from version_stand_ins import git

from benchmarks.compare.copies import version_copies
from midfill.errors import MidfillError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="copies commits")


def test_each_version_is_what_python_imports_from_its_copy(package: Path, temporary: Path) -> None:
    with version_copies("first", package) as copies:
        for copy in (copies.old, copies.new):
            assert copy.source.is_relative_to(temporary)
            assert copy.run(["-c", "import midfill; print(midfill.NAME)"]) == f"{copy.side}\n"
        assert not copies.old.version.modified
        assert copies.new.version.modified
    assert list(temporary.iterdir()) == []


def test_turns_alternate(package: Path) -> None:
    with version_copies("first", package) as copies:
        sides = [copy.side for turn in range(3) for copy in copies.in_turn(turn)]
    assert sides == ["old", "new", "new", "old", "old", "new"]


def test_a_version_that_python_does_not_import_can_not_be_measured(
    package: Path, temporary: Path
) -> None:
    (package / "__init__.py").write_text("__file__ = '/elsewhere/midfill/__init__.py'\n")
    imported = r"^new \(\w+ with changes\) can't be measured: Python imports /elsewhere/midfill"
    with pytest.raises(MidfillError, match=imported), version_copies("first", package):
        pass
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("commit", ["nothing", "--all", "first:src"])
def test_a_commit_that_is_none(package: Path, commit: str) -> None:
    unknown = f"has no commit '{re.escape(commit)}'"
    with pytest.raises(MidfillError, match=unknown), version_copies(commit, package):
        pass


def test_a_commit_without_the_package(package: Path) -> None:
    repository = package.parents[1]
    git(repository, "rm", "-rq", "--cached", "src")
    git(repository, "commit", "-q", "--allow-empty", "-m", "no source")
    git(repository, "tag", "empty")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "again")
    with pytest.raises(MidfillError, match="has no folder src"), version_copies("empty", package):
        pass


@pytest.mark.parametrize("folder", ["site-packages", "repository/.venv"])
def test_a_package_outside_a_git_checkout(package: Path, tmp_path: Path, folder: str) -> None:
    installed = tmp_path / folder / "midfill"
    shutil.copytree(package, installed)
    needed = "two versions are compared from a git checkout"
    with pytest.raises(MidfillError, match=needed), version_copies("first", installed):
        pass


def test_a_repository_gains_nothing(package: Path) -> None:
    def state() -> str:
        listed = ["git", "-C", str(package), "status", "--porcelain", "--ignored"]
        trees = ["git", "-C", str(package), "worktree", "list"]
        return "".join(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for command in (listed, trees)
        )

    before = state()
    with version_copies("first", package):
        pass
    assert state() == before
