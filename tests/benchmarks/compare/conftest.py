"""A git checkout with two versions of a stand-in for midfill."""

from pathlib import Path

import pytest
from version_stand_ins import write_checkout


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where stand-ins note what they are asked."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("STAND_IN_LOG", str(path))
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def package(tmp_path: Path, log: Path, temporary: Path) -> Path:
    """The package of a checkout with a commit ``first`` and a working tree twice as fast."""
    return write_checkout(tmp_path / "repository")
