"""Compilation of the kernels: options, and a cache that follows their source.

All kernels are compiled into a few entry points, so the folder they are kept in is named by a
digest of every kernel's source: a changed kernel never meets a stale compilation.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba

from midfill.kernels.cpu.compiled import CompiledCache
from midfill.system.cache import cache_folder

F = TypeVar("F", bound=Callable[..., Any])


@cache
def compiled_folder() -> Path:
    """Folder of this version's compiled kernels in the user's cache."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return cache_folder() / "kernels" / digest.hexdigest()[:16]


def _compiled(function: F, *, makes_arrays: bool) -> F:
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": makes_arrays}
    compiled: F = numba.njit(**options)(function)
    return compiled


def kernel(function: F) -> F:
    """Compile with Numba: no GIL, IEEE arithmetic as written (no reassociation).

    ``error_model="numpy"`` leaves out the checks for division by zero. A kernel makes no arrays,
    so it goes without Numba's runtime and its reference counts: all threads would write to them at
    every call. Whoever starts a kernel holds the arrays.
    """
    return _compiled(function, makes_arrays=False)


def entry_point(function: F) -> F:
    """Like ``kernel``, kept on disk between processes."""
    compiled: Any = kernel(function)
    compiled._cache = CompiledCache(function, compiled_folder())
    return compiled


def allocating_entry_point(function: F) -> F:
    """Like ``entry_point``, for a function that makes arrays of its own."""
    compiled: Any = _compiled(function, makes_arrays=True)
    compiled._cache = CompiledCache(function, compiled_folder())
    return compiled
