"""Compilation of the kernels: options, and a cache that follows their source.

Numba's own cache looks at the file of the outermost function only. All kernels are compiled
into one entry point, so the cache folder is named by a digest of every kernel source instead: a
changed kernel never meets a stale compilation.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba

from midfill.cache import cache_folder

F = TypeVar("F", bound=Callable[..., Any])


@cache
def compiled_folder() -> Path:
    """Folder of this version's compiled kernels in the user's cache."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return cache_folder() / "kernels" / digest.hexdigest()[:16]


def kernel(function: F) -> F:
    """Compile with Numba: no GIL, IEEE arithmetic as written (no reassociation).

    ``error_model="numpy"`` leaves out the checks for division by zero.
    """
    compiled: F = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    return compiled


def entry_point(function: F) -> F:
    """Like ``kernel``, kept on disk between processes."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(compiled_folder())
    try:
        compiled: F = numba.njit(nogil=True, error_model="numpy", boundscheck=False, cache=True)(
            function
        )
    finally:
        numba.config.CACHE_DIR = before
    return compiled
