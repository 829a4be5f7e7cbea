"""Arrays come back from their file as they were, aligned; a damaged file is no file."""

import mmap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from midfill.kernels.cpu.memory import LINE
from midfill.runners.cpu import packed_arrays
from midfill.runners.cpu.packed_arrays import ArrayWriter, read_arrays, write_arrays
from midfill.system.progress import ignore_progress

ARRAYS = {
    "weights": np.random.default_rng(0).integers(0, 256, 1001).astype(np.uint8),
    "panels": np.arange(12).reshape(6, 2),
    "none": np.zeros(0, np.float32),
    "norm": np.linspace(0, 1, 33, dtype=np.float32),
}


def memory_of(array: np.ndarray) -> object:
    """Return what an array's bytes lie in."""
    while isinstance(array, np.ndarray):
        assert array.base is not None
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def equal(arrays: dict[str, np.ndarray] | None) -> bool:
    assert arrays is not None
    assert list(arrays) == list(ARRAYS)
    return all(
        arrays[name].dtype == array.dtype and np.array_equal(arrays[name], array)
        for name, array in ARRAYS.items()
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_arrays(tmp_path / "m.safetensors", ARRAYS)
    return tmp_path / "m.safetensors"


def test_arrays_come_back_aligned_and_the_library_reads_them_too(path: Path) -> None:
    arrays = read_arrays(path, ignore_progress)
    assert equal(arrays)
    assert arrays is not None
    assert all(array.ctypes.data % LINE == 0 for array in arrays.values() if array.size)
    assert equal(
        dict(sorted(load_file(path).items(), key=lambda item: list(ARRAYS).index(item[0])))
    )


def test_large_arrays_are_read_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_arrays, "_PART_BYTES", 64)
    done: list[tuple[int, int]] = []
    assert equal(read_arrays(path, lambda stage, now, total: done.append((now, total))))
    whole = sum(array.nbytes for array in ARRAYS.values())
    assert len(done) > 10
    assert done[-1] == (whole, whole)


def test_arrays_can_be_made_in_the_file_and_used_from_there(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    writer = ArrayWriter(path)
    content = dict(ARRAYS)
    for name, numbers in (("first", 64), ("second", 128)):
        made = writer.make(name, numbers)
        assert not made.any()
        made[:] = np.arange(numbers)
        content[name] = made.copy()
    writer.finish(ARRAYS)
    mapped = read_arrays(path, ignore_progress, ("first", "second"))
    assert mapped is not None
    for name, expected in content.items():
        np.testing.assert_array_equal(mapped[name], expected)
        assert load_file(path)[name].shape == expected.shape
    for name in ("first", "second"):
        assert isinstance(memory_of(mapped[name]), mmap.mmap)
        assert mapped[name].ctypes.data % LINE == 0
        mapped[name][:] = 0  # a page of this process's own
    again = read_arrays(path, ignore_progress)
    assert again is not None
    np.testing.assert_array_equal(again["first"], np.arange(64))


def test_what_is_not_aligned_in_the_file_is_not_mapped(path: Path) -> None:
    assert read_arrays(path, ignore_progress, ("weights",)) is not None
    assert read_arrays(path, ignore_progress, ("panels",)) is None  # 1001 bytes behind
    with pytest.raises(ValueError, match="65 bytes are no multiple of 64"):
        ArrayWriter(path).make("odd", 65)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 40, b"\2\0\0\0\0\0\0\0[]"])
def test_what_is_no_such_file_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken"
    path.write_bytes(content)
    assert read_arrays(path, ignore_progress) is None
    assert read_arrays(tmp_path / "missing", ignore_progress) is None


@pytest.mark.parametrize("size", [7, 20, 300, -1])
def test_a_truncated_file_is_none(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    assert read_arrays(path, ignore_progress) is None
