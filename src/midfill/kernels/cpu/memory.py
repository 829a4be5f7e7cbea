"""Memory that kernels work on: zeros that start where a cache line does, or a page."""

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

LINE = 64
"""Bytes of a cache line."""


def aligned_zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of zeros in C order whose first element is at a multiple of 64 bytes.

    A vector of 16 float32 fills a cache line. Where an array starts anywhere, every such vector
    lies on two, and takes twice as long to read or to write.
    """
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    block = np.zeros(size + LINE, np.uint8)
    start = -block.ctypes.data % LINE
    return block[start : start + size].view(kind).reshape(shape)


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy that starts at a multiple of 64 bytes."""
    if array.ctypes.data % LINE == 0:
        return array
    copy = aligned_zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


def untouched(size: int, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """[size] zeros of ``dtype``, backed by the system's smallest pages.

    For pools that are large and filled bit by bit in many places. numpy asks for pages of 2 MiB:
    the first token written in every layer and head of a pool then takes hundreds of megabytes, and
    the time to clear them.
    """
    kind = np.dtype(dtype)
    if size == 0:
        return np.zeros(0, kind)
    memory = mmap.mmap(-1, size * kind.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind)
