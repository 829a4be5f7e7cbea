"""The cache holds complete files, and only those in use."""

import os
import time
from pathlib import Path

from midfill.system.cache import mark_used, remove_unused, store_file

DAY = 86400.0


def aged(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def write_all(path: Path) -> None:
    path.write_text("all")


def test_concurrent_writers_of_one_file_leave_one_complete_file(tmp_path: Path) -> None:
    def write_while_another_stores(path: Path) -> None:
        store_file(tmp_path / "file", write_all)
        path.write_text("the last one wins")

    store_file(tmp_path / "file", write_while_another_stores)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "the last one wins"


def test_a_stored_file_is_complete_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    store_file(tmp_path / "deep" / "file", write_all)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]
    assert (tmp_path / "deep" / "file").read_text() == "all"


def test_entries_unused_for_a_month_are_removed(tmp_path: Path) -> None:
    for name in ("old", "used"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        aged(tmp_path / name, 31)
    for name, days in (("old.file", 31), ("used.file", 31), ("recent.file", 29)):
        (tmp_path / name).touch()
        aged(tmp_path / name, days)
    mark_used(tmp_path / "used")
    mark_used(tmp_path / "used.file")
    remove_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recent.file", "used", "used.file"]
    assert (tmp_path / "used" / "file").exists()


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "link").symlink_to(tmp_path / "real")
    os.utime(cache / "link", (0, 0), follow_symlinks=False)
    remove_unused(cache)
    assert not list(cache.iterdir())
    assert (tmp_path / "real" / "file").exists()


def test_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    remove_unused(tmp_path / "none")
    mark_used(tmp_path / "none")
