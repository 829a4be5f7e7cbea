"""Memory-mapped files: how much of them stays in memory."""

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt


def release_pages(array: npt.NDArray[Any]) -> None:
    """Let the system have back what was read of the mapped file that an array views.

    What is needed again is read again. Does nothing for other arrays.
    """
    owner = _map_of(array)
    if owner is not None and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


def read_ahead(array: npt.NDArray[Any]) -> None:
    """Have the system read what a contiguous array views of a mapped file, without waiting.

    Does nothing for other arrays.
    """
    owner = _map_of(array)
    if owner is None or not hasattr(mmap, "MADV_WILLNEED"):
        return
    start = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):  # a file system without it
        owner.madvise(mmap.MADV_WILLNEED, first, start + array.nbytes - first)


def _map_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    """Return the mapped file that an array views, None if it is in memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None
