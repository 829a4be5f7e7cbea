"""Memory-mapped files: how much of them stays in memory."""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def release_pages(array: npt.NDArray[Any]) -> None:
    """Let the system have back what was read of the mapped file that an array views.

    What is needed again is read again. Does nothing for other arrays.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)
