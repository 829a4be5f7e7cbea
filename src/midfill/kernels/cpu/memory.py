"""Memory that is only taken as it is written to."""

import contextlib
import mmap

import numpy as np
import numpy.typing as npt


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
