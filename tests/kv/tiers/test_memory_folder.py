"""The folder in memory: private, removed with its server, or by the next one."""

from pathlib import Path

import filelock
import pytest

from midfill.errors import OptionError
from midfill.kv.tiers.memory_folder import MemoryFolder


def test_it_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    folder = MemoryFolder(1000, tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "chunk").write_bytes(b"kv")
    folder.remove()
    assert not folder.path.exists()


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "midfill-kv-left"
    left.mkdir()
    (left / "owner").touch()
    alive = tmp_path / "midfill-kv-alive"
    alive.mkdir()
    with filelock.FileLock(alive / "owner"):
        folder = MemoryFolder(1000, tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"midfill-kv-alive", folder.path.name}


def test_too_little_memory_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has only"):
        MemoryFolder(2**60, tmp_path)


def test_without_a_file_system_in_memory_there_is_another_way(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--warm-tier-disk"):
        MemoryFolder(1000, tmp_path / "none")
