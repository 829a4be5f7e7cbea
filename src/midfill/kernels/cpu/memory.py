"""Arrays that kernels work on: their types, and memory aligned to cache lines or pages."""

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
Uint8Array = npt.NDArray[np.uint8]

LINE = 64
"""Bytes per cache line."""


def aligned_zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return zeros in C order whose first element lies at a multiple of 64 bytes.

    A vector of 16 float32 fills one cache line. In an array that starts anywhere else, every such
    vector lies on two lines and takes twice as long to read or write.
    """
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    block = np.zeros(size + LINE, np.uint8)
    start = -block.ctypes.data % LINE
    return block[start : start + size].view(kind).reshape(shape)


def small_page_zeros(size: int, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return [size] zeros backed by the system's smallest pages, taken only as they are written.

    For pools that are large and filled in many places at once. NumPy asks for pages of 2 MiB: the
    first token, which is written in every layer and head of a pool, would take hundreds of
    megabytes and the time to clear them.
    """
    kind = np.dtype(dtype)
    if size == 0:
        return np.zeros(0, kind)
    memory = mmap.mmap(-1, size * kind.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind)
