"""Files of arrays by name, read straight into the memory that kernels use.

They are in the safetensors format. The library's own reader returns bytes that would have to be
copied to aligned memory, and its writer copies all arrays at once; with weights of gigabytes,
either takes as much memory again.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.memory import aligned_zeros
from midfill.system.progress import Progress

Arrays = Mapping[str, npt.NDArray[np.generic]]

_DTYPES = {"U8": np.uint8, "I64": np.int64, "F32": np.float32}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_PART_BYTES = 1 << 26
_READERS = 2
"""Threads: one alone clears and fills memory more slowly than a disk, or its cache, delivers."""


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write a file of uint8, int64 and float32 arrays.

    Raises:
        OSError: it can't be written.
    """
    header = {}
    at = 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {
            "dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets,
        }  # fmt: skip
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for array in arrays.values():
            if array.nbytes:
                file.write(_bytes_of(array))


def read_arrays(path: Path, progress: Progress) -> dict[str, npt.NDArray[np.generic]] | None:
    """Return a file's arrays, aligned to cache lines; None if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > size:
                return None
            header = json.loads(file.read(start - 8))
            if start + max((e["data_offsets"][1] for e in header.values()), default=0) != size:
                return None
            arrays = {}
            parts = []
            for name, entry in header.items():
                arrays[name] = aligned_zeros(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
                if arrays[name].nbytes:
                    at = start + entry["data_offsets"][0]
                    parts += _parts(_bytes_of(arrays[name]), at)
        _fill(path, parts, progress)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return arrays


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
