"""Files of arrays by name, read straight into the memory that kernels use, or mapped.

They are in the safetensors format. The library's own reader returns bytes that would have to be
copied to aligned memory, and its writer copies all arrays at once; with weights of gigabytes,
either takes as much memory again.

An array that is larger than the memory can be made in the file itself, and used from there: the
system keeps those of its pages in memory that are read most.
"""

import json
import mmap
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.memory import LINE, Uint8Array, aligned_zeros
from midfill.system.progress import Progress

Arrays = Mapping[str, npt.NDArray[np.generic]]

_DTYPES = {"U8": np.uint8, "I64": np.int64, "F32": np.float32}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_HEADER_BYTES = 1 << 14
"""Room for the header, with the eight bytes of its length; the arrays follow it."""
_PART_BYTES = 1 << 26
_READERS = 2
"""Threads: one alone clears and fills memory more slowly than a disk, or its cache, delivers."""


class ArrayWriter:
    """Writes a file of uint8, int64 and float32 arrays, some of which are made in it.

    Args:
        path: the file; it is replaced.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: dict[str, Uint8Array] = {}
        self._end = _HEADER_BYTES
        path.write_bytes(b"")

    def make(self, name: str, size: int) -> Uint8Array:
        """Return [size] zeros in the file, aligned to cache lines.

        Raises:
            OSError: the file can't be that long.
            ValueError: the size is no multiple of cache lines: what follows would not be aligned.
        """
        if size % LINE:
            raise ValueError(f"{name}: {size} bytes are no multiple of {LINE}")
        with self._path.open("r+b") as file:
            file.truncate(self._end + size)
            self._made[name] = _map(file, self._end, size, mmap.ACCESS_WRITE)
        self._end += size
        return self._made[name]

    def finish(self, arrays: Arrays) -> None:
        """Write the header, and those arrays that weren't made in the file."""
        ordered = {**self._made, **{k: arrays[k] for k in arrays if k not in self._made}}
        header, at = {}, 0
        for name, array in ordered.items():
            header[name] = {
                "dtype": _NAMES[array.dtype], "shape": list(array.shape),
                "data_offsets": [at, at + array.nbytes],
            }  # fmt: skip
            at += array.nbytes
        text = json.dumps(header).encode().ljust(_HEADER_BYTES - 8)
        assert len(text) == _HEADER_BYTES - 8, "too many arrays for the header's room"
        with self._path.open("r+b") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            file.seek(self._end)
            for name, array in ordered.items():
                if name not in self._made and array.nbytes:
                    file.write(_bytes_of(array))


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write a file of uint8, int64 and float32 arrays.

    Raises:
        OSError: it can't be written.
    """
    ArrayWriter(path).finish(arrays)


def read_arrays(
    path: Path, progress: Progress, mapped: Collection[str] = ()
) -> dict[str, npt.NDArray[np.generic]] | None:
    """Return a file's arrays, aligned to cache lines; None if it is missing or damaged.

    Args:
        path: the file.
        progress: receives the megabytes that are read.
        mapped: names of arrays that are left in the file. Where one of them isn't aligned there,
            the file counts as damaged.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > size:
                return None
            header = json.loads(file.read(start - 8))
            if start + max((e["data_offsets"][1] for e in header.values()), default=0) != size:
                return None
            arrays: dict[str, npt.NDArray[np.generic]] = {}
            parts = []
            for name, entry in header.items():
                at, shape = start + entry["data_offsets"][0], tuple(entry["shape"])
                dtype = _DTYPES[entry["dtype"]]
                if name in mapped:
                    length = start + entry["data_offsets"][1] - at
                    arrays[name] = _map(file, at, length, mmap.ACCESS_COPY).view(dtype)
                    arrays[name] = arrays[name].reshape(shape)
                    continue
                arrays[name] = aligned_zeros(shape, dtype)
                if arrays[name].nbytes:
                    parts += _parts(_bytes_of(arrays[name]), at)
        _fill(path, parts, progress)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return arrays


def _map(file: BinaryIO, at: int, size: int, access: int) -> Uint8Array:
    """Return bytes of a file, mapped.

    To Numba, an array that can't be written has another type. So one that is only read is mapped
    for copying pages that are written.

    Raises:
        OSError: it can't be mapped.
        ValueError: it isn't aligned to cache lines.
    """
    if at % LINE:
        raise ValueError(f"byte {at} of the file is not aligned")
    if not size:
        return np.zeros(0, np.uint8)
    before = at % mmap.ALLOCATIONGRANULARITY
    memory = mmap.mmap(file.fileno(), before + size, access=access, offset=at - before)
    return np.frombuffer(memory, np.uint8)[before:]


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """Return the memory of an array that has any."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _parts(memory: memoryview, at: int) -> list[tuple[memoryview, int]]:
    """Divide memory that holds a file's bytes from ``at`` on."""
    starts = range(0, len(memory), _PART_BYTES)
    return [(memory[start : start + _PART_BYTES], at + start) for start in starts]


def _fill(path: Path, parts: list[tuple[memoryview, int]], progress: Progress) -> None:
    """Read parts of a file into memory; report megabytes."""
    total = sum(len(memory) for memory, _ in parts)
    done = 0
    with ThreadPoolExecutor(_READERS) as pool:
        for count in pool.map(lambda part: _read(path, *part), parts):
            done += count
            progress("reading weights", done, total)


def _read(path: Path, memory: memoryview, at: int) -> int:
    """Fill memory from byte ``at`` of a file on; return its size.

    Each call opens the file, so that threads share no position; not every system reads without one.

    Raises:
        OSError: the file ends before that.
    """
    done = 0
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        while done < len(memory):
            count = file.readinto(memory[done:])
            if not count:
                raise OSError("the file ends too early")
            done += count
    return done
