"""Files and folders appear complete or not at all; pages of mapped files are given back."""

import mmap
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from midfill.errors import MidfillError
from midfill.system import files
from midfill.system.files import read_ahead, release_pages, replacing_file, write_file, write_folder


def fill(folder: Path) -> None:
    (folder / "a").write_text("new")


def fail(folder: Path) -> None:
    (folder / "a").write_text("half")
    raise OSError(28, "No space left on device")


def below(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_and_those_above_it_are_made(tmp_path: Path) -> None:
    write_folder(tmp_path / "deep" / "x", fill)
    assert below(tmp_path) == {"deep/x/a": "new"}


def test_files_get_the_mode_of_new_ones(tmp_path: Path) -> None:
    def fill_in_secret(folder: Path) -> None:
        fill(folder)
        (folder / "a").chmod(0o600)

    (tmp_path / "new").touch()
    write_folder(tmp_path / "x", fill_in_secret)
    assert (tmp_path / "x" / "a").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_folder_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").write_text("old")
    write_folder(tmp_path / "x", fill)
    assert below(tmp_path) == {"x/a": "new"}


def test_leftovers_of_a_killed_process_are_replaced(tmp_path: Path) -> None:
    for name in (".x.writing", ".x.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").write_text("left")
    (tmp_path / "x").mkdir()
    write_folder(tmp_path / "x", fill)
    assert below(tmp_path) == {"x/a": "new"}


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    write_folder(tmp_path / "x", fill)
    with pytest.raises(MidfillError, match=r"x: can't be written: No space left on device; what"):
        write_folder(tmp_path / "x", fail)
    assert below(tmp_path) == {"x/a": "new"}
    assert os.listdir(tmp_path) == ["x"]


def test_other_errors_leave_nothing_behind_either(tmp_path: Path) -> None:
    def stop(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "x", stop)
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MidfillError, match="can't be written"):
        write_folder(tmp_path / "file" / "x", fill)
    with pytest.raises(MidfillError, match="can't be written"):
        write_file(tmp_path / "file" / "x", "text")


def test_a_text_file(tmp_path: Path) -> None:
    write_file(tmp_path / "deep" / "a", "old")
    write_file(tmp_path / "deep" / "a", "é\n")
    assert below(tmp_path) == {"deep/a": "é\n"}


def test_a_file_that_fails_is_not_replaced(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "old")

    def fail_halfway() -> None:
        with replacing_file(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert below(tmp_path) == {"a": "old"}


def left_behind(folder: Path, seconds_ago: float) -> Path:
    """Make a temporary file as a writer leaves it that was killed."""
    path = folder / f".b.txt.{uuid4().hex}.partial"
    path.write_text("half")
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


def test_a_temporary_file_has_the_permissions_that_are_asked_for(tmp_path: Path) -> None:
    with replacing_file(tmp_path / "secret", mode=0o600) as temporary:
        assert temporary.stat().st_mode & 0o077 == 0
        temporary.touch()


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of POSIX systems")
def test_files_of_killed_writers_are_removed_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    killed, just_made = left_behind(tmp_path, 61), left_behind(tmp_path, 1)
    foreign = tmp_path / ".c.partial"
    foreign.touch()
    os.utime(foreign, (0, 0))
    with replacing_file(tmp_path / "slow") as running:
        running.write_text("half")
        os.utime(running, (0, 0))
        write_file(tmp_path / "a", "new")
        assert not killed.exists()
        assert all(path.exists() for path in (just_made, foreign, running))
    assert (tmp_path / "slow").read_text() == "half"


def test_without_locks_files_count_as_left_behind_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_is_locked", lambda _: None)
    old, recent = left_behind(tmp_path, 3601), left_behind(tmp_path, 3000)
    write_file(tmp_path / "a", "new")
    assert not old.exists()
    assert recent.exists()


FULL_DISK = """
    import resource, signal, sys
    from pathlib import Path

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from midfill.errors import MidfillError
    from midfill.system.files import write_file, write_folder

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    big = {"weights": torch.zeros(100_000)}
    writers = {
        "torch": lambda folder: torch.save(big, folder / "a"),
        "safetensors": lambda folder: save_file(big, folder / "a"),
        "text": lambda folder: (folder / "a").write_text("x" * 100_000),
    }
    for name, write in writers.items():
        try:
            write_folder(Path(name), write, errors=(RuntimeError, SafetensorError))
        except MidfillError as error:
            print(error)
    try:
        write_file(Path("file"), "x" * 100_000)
    except MidfillError as error:
        print(error)
"""


def test_when_no_more_can_be_written_one_line_says_so_and_the_old_stays(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name in ("torch", "safetensors", "text"):
        write_folder(tmp_path / name, fill)
    write_file(tmp_path / "file", "new")
    script = textwrap.dedent(FULL_DISK)
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert [line.partition(": can't be written: ")[0] for line in lines] == [
        "torch",
        "safetensors",
        "text",
        "file",
    ]
    assert below(tmp_path) == {
        "torch/a": "new",
        "safetensors/a": "new",
        "text/a": "new",
        "file": "new",
    }


def resident_bytes(path: Path) -> int:
    """Return how much of a mapped file is in this process's memory."""
    mapping = Path("/proc/self/smaps").read_text().partition(f"{path}\n")[2]
    (found,) = re.findall(r"^Rss: +(\d+) kB$", mapping, re.MULTILINE)[:1]
    return int(found) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_read_of_a_file_leaves_memory(tmp_path: Path) -> None:
    content = np.arange(2**20, dtype=np.int64)
    (tmp_path / "data").write_bytes(content.tobytes())
    with (tmp_path / "data").open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(held, np.int64)[16:].reshape(-1, 16)
    total = array.sum()
    assert resident_bytes(tmp_path / "data") > content.nbytes // 2
    release_pages(array)
    assert resident_bytes(tmp_path / "data") < content.nbytes // 8
    assert array.sum() == total


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="can't ask what is in the page cache")
def test_a_part_of_a_file_is_read_ahead(tmp_path: Path) -> None:
    content = np.arange(2**20, dtype=np.int64)
    path = tmp_path / "data"
    path.write_bytes(content.tobytes())
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(file.fileno(), 10_000 * 8):
            pytest.skip("this file system keeps files in memory")
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        read_ahead(np.frombuffer(held, np.int64)[10_000:20_000])
        deadline = time.monotonic() + 30
        while not is_cached(file.fileno(), 10_000 * 8) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_cached(file.fileno(), 10_000 * 8)
        assert not is_cached(file.fileno(), content.nbytes - 8)


def is_cached(file: int, at: int) -> bool:
    """Return whether a file's byte can be read without the disk."""
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def test_other_arrays_are_left_alone() -> None:
    array = np.arange(10)
    read_ahead(array[2:])
    release_pages(array[2:])
    assert array.sum() == 45


@pytest.mark.skipif(sys.platform != "linux", reason="names open files by /proc")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_new_name_is_flushed_after_what_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Otherwise a power cut could take the name back, or leave it without its content."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_flush(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.split(".")[-1])
        fsync(handle)

    def note_name(path: Path, target: Path) -> None:
        done.append("renamed")
        replace(path, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "replace", note_name)
    if kind == "file":
        write_file(tmp_path / "kept" / "x", "new")
        assert done == ["partial", "renamed", "kept"]
    else:
        write_folder(tmp_path / "kept" / "x", fill)
        assert done == ["a", "writing", "renamed", "kept"]
