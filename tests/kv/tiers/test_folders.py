"""Folders of chunks: files that are whole or absent, bounded, private, and found again."""

import contextlib
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from midfill.errors import MidfillError, OptionError
from midfill.kv.tiers import folders as module
from midfill.kv.tiers.folders import ChunkFolder, MemoryFolder, open_disk_folder


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def names(path: Path) -> set[str]:
    return {one.name for one in path.iterdir()} - {"lock"}


def open_folder(path: Path, capacity: int = 1000) -> ChunkFolder:
    return ChunkFolder(path, capacity, durable=True)


def test_what_is_stored_is_loaded_also_by_the_next_process(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.store(key(1), b"one")
    assert folder.load(key(1)) == b"one"
    assert folder.load(key(2)) is None
    folder.close()
    again = open_folder(tmp_path / "kv")
    assert key(1) in again
    assert (again.chunks, again.used_bytes) == (1, 3)
    assert again.load(key(1)) == b"one"


def test_the_least_recently_used_go_when_there_is_no_room(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv", 10)
    for number in range(3):
        folder.store(key(number), b"abc")
    folder.load(key(0))
    folder.touch([key(1)])
    folder.store(key(3), b"abcd")
    assert [number for number in range(4) if key(number) in folder] == [0, 1, 3]
    assert folder.used_bytes == 10
    assert folder.evicted_chunks == 1
    folder.store(key(4), b"abcdefghijk")
    assert key(4) not in folder, "it is larger than the folder may be"
    assert folder.chunks == 3
    folder.close()
    assert open_folder(tmp_path / "kv", 5).used_bytes <= 5


@pytest.mark.parametrize("reopen", [False, True])
def test_the_end_of_a_text_goes_before_its_beginning(tmp_path: Path, reopen: bool) -> None:
    folder = open_folder(tmp_path / "kv", 30)
    for number in range(6):
        folder.store(key(number), b"abcde", [key(each) for each in range(number)])
    folder.load(key(5))
    folder.touch([key(number) for number in range(6)])
    if reopen:
        folder.close()
        folder = open_folder(tmp_path / "kv", 30)
    folder.shrink(15)
    kept = {number for number in range(6) if key(number) in folder}
    # Of a file that was read, the next process knows when.
    assert kept == ({0, 1, 5} if reopen else {0, 1, 2})


def test_storing_again_replaces(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.store(key(1), b"one")
    folder.store(key(1), b"other")
    assert (folder.chunks, folder.used_bytes) == (1, 5)


def test_files_are_private_and_so_is_the_folder(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = open_folder(tmp_path / "kv")
        folder.store(key(1), b"one")
    finally:
        os.umask(before)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    (file,) = (tmp_path / "kv").glob("*.kv")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o755)
    with pytest.raises(MidfillError, match="chmod 700"):
        open_folder(tmp_path / "kv")


def test_a_file_that_others_could_have_written_is_removed(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.store(key(1), b"one")
    (file,) = (tmp_path / "kv").glob("*.kv")
    file.chmod(0o666)
    assert folder.load(key(1)) is None
    assert not file.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.store(key(1), b"one")
    (file,) = (tmp_path / "kv").glob("*.kv")
    file.unlink()
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    file.symlink_to(tmp_path / "elsewhere")
    assert folder.load(key(1)) is None
    assert (tmp_path / "elsewhere").exists()


def test_a_folder_has_one_user_at_a_time(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    with pytest.raises(MidfillError, match="another server of this model"):
        open_folder(tmp_path / "kv")
    folder.close()
    open_folder(tmp_path / "kv")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MidfillError, match="can't be used for the warm tier"):
        open_folder(tmp_path / "file")


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.close()
    (tmp_path / "kv" / "notes.txt").write_text("mine")
    (tmp_path / "kv" / "12ab.kv").write_text("no key")
    assert open_folder(tmp_path / "kv").chunks == 0
    assert names(tmp_path / "kv") == {"notes.txt", "12ab.kv"}


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.store(key(1), b"one")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        with pytest.raises(OSError, match="Input/output"):
            folder.store(key(2), b"two")
    assert names(tmp_path / "kv") == {f"{key(1).hex()}.kv"}
    assert key(2) not in folder
    assert folder.used_bytes == 3
    folder.store(key(2), b"two")
    assert folder.load(key(2)) == b"two"


class FullDisk:
    """A disk of so many bytes, on which a folder is."""

    def __init__(self, path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.size = size
        self._write = os.write
        monkeypatch.setattr(module.os, "write", self.write)

    @property
    def used(self) -> int:
        return sum(one.stat().st_size for one in self.path.iterdir())

    def write(self, handle: int, data: bytes) -> int:
        free = self.size - self.used
        if free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(handle, bytes(data[:free]))


def test_on_a_full_disk_the_oldest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path / "kv", 1000)
    disk = FullDisk(tmp_path / "kv", 100, monkeypatch)
    for number in range(50):
        assert folder.store(key(number), bytes([number]) * 20)
        assert folder.used_bytes == disk.used, "the metric is what is there"
    assert [number for number in range(50) if key(number) in folder] == [45, 46, 47, 48, 49]
    assert folder.evicted_chunks == 45


def test_a_disk_that_others_fill_does_not_cost_all_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path / "kv", 1000)
    disk = FullDisk(tmp_path / "kv", 1000, monkeypatch)
    for number in range(40):
        folder.store(key(number), bytes(20))
    disk.size = 0  # others take what becomes free
    with pytest.raises(OSError, match="No space left"):
        folder.store(key(99), bytes(20))
    assert folder.chunks == 33
    assert folder.used_bytes == disk.used


def test_a_file_that_can_not_be_removed_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.store(key(1), b"one")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", fail)
    folder.remove(key(1))
    assert key(1) not in folder
    assert folder.used_bytes == 3


def test_what_is_not_stored_is_said_not_to_be(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv", 10)
    assert not folder.store(key(1), bytes(11))
    folder.close()
    assert not folder.store(key(2), b"two")


def test_a_folder_that_is_closed_during_a_write_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.store(key(1), b"one")
    fsync = os.fsync

    def close_meanwhile(handle: int) -> None:
        assert folder.used_bytes == len(b"one") + len(b"three"), "what is being written counts"
        folder.close()
        assert names(tmp_path / "kv") == {f"{key(1).hex()}.kv"}
        fsync(handle)

    monkeypatch.setattr(os, "fsync", close_meanwhile)
    folder.store(key(2), b"three")
    folder.store(key(3), b"four")
    assert names(tmp_path / "kv") == {f"{key(1).hex()}.kv"}
    assert folder.used_bytes == len(b"one")


class _KilledError(BaseException):
    """Ends a write where SIGKILL would."""


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_write_that_is_killed_leaves_no_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder = open_folder(tmp_path / "kv")

    def die(*_: object) -> None:
        raise _KilledError

    with monkeypatch.context() as patched:
        patched.setattr(os, at, die)
        patched.setattr(Path, "unlink", lambda *_, **__: None)  # no cleaning up either
        with pytest.raises(_KilledError):
            folder.store(key(1), b"one")
    assert len(names(tmp_path / "kv")) == 1
    folder.close()
    again = open_folder(tmp_path / "kv")
    assert key(1) not in again
    assert not names(tmp_path / "kv"), "what was left is removed"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path / "kv")
    write = os.write
    monkeypatch.setattr(module.os, "write", lambda handle, data: write(handle, data[:2]))
    folder.store(key(1), b"seven b")
    assert folder.load(key(1)) == b"seven b"


def test_other_models_have_half_of_the_space_at_most(tmp_path: Path) -> None:
    for number in range(3):
        other = open_disk_folder(tmp_path, f"{number:032x}", 10_000)
        other.store(key(1), bytes(300))
        os.utime(other.path, (number, number))
        other.close()
    (tmp_path / "mine").mkdir()
    opened = open_disk_folder(tmp_path, "f" * 32, 1000)
    assert {one.name for one in tmp_path.iterdir()} == {"mine", f"{2:032x}", "f" * 32}
    assert opened.capacity == 700


def test_what_a_killed_server_of_another_model_left_unfinished_is_removed(tmp_path: Path) -> None:
    other = open_disk_folder(tmp_path, "0" * 32, 1000)
    other.store(key(1), b"one")
    (other.path / f".{key(2).hex()}.1.1.partial").write_bytes(bytes(300))
    other.close()
    assert open_disk_folder(tmp_path, "f" * 32, 1000).capacity == 997
    assert names(other.path) == {f"{key(1).hex()}.kv"}


def test_models_that_are_served_keep_their_space(tmp_path: Path) -> None:
    served = open_disk_folder(tmp_path, "0" * 32, 10_000)
    served.store(key(1), bytes(5000))
    assert open_disk_folder(tmp_path, "f" * 32, 1000).capacity == 1000
    assert served.load(key(1)) is not None


def test_servers_of_one_model_have_a_folder_each(tmp_path: Path) -> None:
    name = "0" * 32
    first, second = (open_disk_folder(tmp_path, name, 1000) for _ in range(2))
    assert (first.path.name, second.path.name) == (name, f"{name}-2")
    second.store(key(1), bytes(400))
    second.close()
    first.close()
    assert open_disk_folder(tmp_path, name, 1000).capacity == 600, "the other's files count"


_STORE_FOR_EVER = """
import sys
from pathlib import Path
from midfill.kv.tiers.folders import ChunkFolder
folder = ChunkFolder(Path(sys.argv[1]), 10**6, durable=True)
for number in range(10**9):
    folder.store(number.to_bytes(32, "big"), number.to_bytes(4, "big") * 25_000)
    print(number, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_files(tmp_path: Path) -> None:
    for kill_after in (1, 7, 12):
        with subprocess.Popen(
            [sys.executable, "-c", _STORE_FOR_EVER, str(tmp_path / "kv")],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for _ in range(kill_after):
                assert process.stdout.readline()
            process.kill()
        folder = open_folder(tmp_path / "kv", 10**6)
        assert folder.chunks > 0
        assert folder.used_bytes <= 10**6
        for name in names(tmp_path / "kv"):
            number = int(name.removesuffix(".kv"), 16)
            assert folder.load(key(number)) == number.to_bytes(4, "big") * 25_000
        folder.close()


_WRITE_SLOWLY = """
import os, sys, time
from pathlib import Path
from midfill.kv.tiers.folders import ChunkFolder
folder = ChunkFolder(Path(sys.argv[1]), 10**6, durable=True)
folder.store(bytes(32), b"whole")
write = os.write
def slowly(handle, data):
    time.sleep(0.01)
    return write(handle, data[:100])
os.write = slowly
folder.store(b"\\x01" * 32, bytes(10**6 - 5))
"""


def test_a_process_that_is_killed_in_the_middle_of_a_file_leaves_the_others(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", _WRITE_SLOWLY, str(tmp_path / "kv")]
    for _ in range(2):
        with subprocess.Popen(command) as process:
            deadline = time.monotonic() + 60
            while not (begun := sizes(tmp_path / "kv", "*.partial")) or begun[0] < 200:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.005)
            process.kill()
        assert 0 < sizes(tmp_path / "kv", "*.partial")[0] < 10**6 - 5, "it was in the middle"
        folder = open_folder(tmp_path / "kv", 10**6)
        assert (folder.chunks, folder.load(bytes(32))) == (1, b"whole")
        assert names(tmp_path / "kv") == {f"{bytes(32).hex()}.kv"}
        folder.close()


def sizes(path: Path, pattern: str) -> list[int]:
    """Return the sizes of files."""
    return [one.stat().st_size for one in path.glob(pattern)]


class OldFileLock(contextlib.nullcontext[None]):
    """filelock's before 3.20.1, which emptied the file that a link named."""

    def __init__(self, path: Path, *, blocking: bool) -> None:
        super().__init__()
        self._path = path

    def __enter__(self) -> None:
        self.acquire()

    def acquire(self) -> None:
        self._path.write_bytes(b"")

    def release(self) -> None:
        pass


@pytest.mark.parametrize("plant", ["link", "others", "linked-folder"])
def test_what_others_planted_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    monkeypatch.setattr(module.filelock, "FileLock", OldFileLock)
    (tmp_path / "mine").write_text("precious")
    planted, disk = tmp_path / "midfill-kv-planted", tmp_path / "disk"
    elsewhere = tmp_path / "elsewhere"
    disk.mkdir(mode=0o700)
    for folder in (planted, disk / ("0" * 32)):
        where = elsewhere if plant == "linked-folder" else folder
        where.mkdir(exist_ok=True)
        for name in ("owner", "lock"):
            (where / name).unlink(missing_ok=True)
            (where / name).symlink_to(tmp_path / "mine")
        if plant == "linked-folder":
            folder.symlink_to(elsewhere)
        elif plant == "others":
            folder.chmod(0o777)
    MemoryFolder(1000, tmp_path)
    open_disk_folder(disk, "f" * 32, 1000)
    assert (tmp_path / "mine").read_text() == "precious"
    assert planted.exists()
    assert (disk / ("0" * 32)).exists()


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
