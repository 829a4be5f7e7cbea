"""Pages of a mapped file are given back, and read again where they are needed."""

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from midfill.system.mapped_files import release_pages


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


def test_other_arrays_are_left_alone() -> None:
    array = np.arange(10)
    release_pages(array[2:])
    assert array.sum() == 45
