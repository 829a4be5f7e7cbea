"""Pages of a mapped file are given back, and read again where they are needed."""

import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from midfill.system.mapped_files import read_ahead, release_pages


def resident_file_bytes() -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_read_of_a_file_leaves_memory(tmp_path: Path) -> None:
    content = np.arange(2**20, dtype=np.int64)
    (tmp_path / "data").write_bytes(content.tobytes())
    with (tmp_path / "data").open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(held, np.int64)[16:].reshape(-1, 16)
    before = resident_file_bytes()
    total = array.sum()
    assert resident_file_bytes() - before > content.nbytes // 2
    release_pages(array)
    assert resident_file_bytes() - before < content.nbytes // 8
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
