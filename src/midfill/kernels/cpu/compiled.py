"""Cache of compiled kernels on disk: one file per function, signature and chip.

Numba's own cache is not used, for three reasons. It keeps an index of a function's compilations,
and two processes that compile at the same time can leave entries that point at each other's code.
A truncated file ends the program. Where the cache folder can't be written, it stores code beside
the source or in the home folder, and never removes it. Here the file's name identifies its
content, and a digest at its start proves that it is complete.

Compiled kernels are loaded as code. So the folder is private to the user, and files that belong
to another user, or that others may write to, are refused.
"""

import hashlib
import inspect
import logging
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
from filelock import FileLock, Timeout
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from midfill.system.cache import mark_used, remove_unused, store_file

_log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_MAX_WAIT_SECONDS = 600.0


class CompiledCache:
    """Compilations of one function; takes the place of ``numba.core.caching.Cache``.

    Args:
        function: the Python function.
        folder: where the files are kept. Its name must change with the source of every function
            that this one calls; changes of the function's own file are detected here.
        makes_arrays: whether the function allocates arrays.
    """

    def __init__(
        self, function: Callable[..., Any], folder: Path, *, makes_arrays: bool = False
    ) -> None:
        self._makes_arrays = makes_arrays
        self._name = function.__qualname__
        self._folder = folder
        self._source = hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()

    @property
    def cache_path(self) -> str:
        """Return the folder, for Numba's statistics."""
        return str(self._folder)

    @contextmanager
    def compiling(self, signature: Any, codegen: Any) -> Iterator[bool]:
        """Let one process at a time compile a signature; those that wait find it in the cache.

        A process that waits for long, or that can't write to the cache, goes on by itself.

        Yields:
            whether this is the process that compiles it, and what it stores is there afterwards.
        """
        path = self._path(signature, codegen)
        with ExitStack() as stack:
            is_first = False
            # Not the path's own method, which fails in another user's folder.
            if not os.path.exists(path):
                lock = self._folder.parent / f"{self._folder.name}-{path.name}.lock"
                with suppress(OSError, Timeout):
                    self._folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
                    stack.enter_context(
                        FileLock(lock, timeout=_MAX_WAIT_SECONDS, mode=_PRIVATE_FILE)
                    )
                    is_first = not os.path.exists(path) and os.access(self._folder, os.W_OK)
            yield is_first

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the function compiled for a signature and this chip, or None if not cached."""
        if self._makes_arrays:
            target_context.refresh()  # links Numba's runtime
        stored = _read_trusted(self._path(signature, target_context.codegen()))
        if stored is None:
            return None
        digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() != digest:
            return None  # truncated or damaged: compiled again and replaced
        mark_used(self._folder)
        return CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store a compilation, if the folder can be written."""
        if compiled.library.has_dynamic_globals:
            return  # it holds addresses of this process
        code = dumps(_without_ir(*compiled._reduce()))
        stored = hashlib.sha256(code).digest() + code
        with suppress(OSError):  # ``store_file`` logs why the folder can't be made
            self._folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
        path = self._path(signature, compiled.codegen)
        store_file(path, lambda temporary: temporary.write_bytes(stored), _PRIVATE_FILE)
        remove_unused(self._folder.parent)

    def _path(self, signature: Any, codegen: Any) -> Path:
        """Return the file of a signature on this chip and Python version (code is pickled)."""
        key = (str(signature), codegen.magic_tuple(), sys.implementation.cache_tag, self._source)
        return self._folder / f"{self._name}-{hashlib.sha256(repr(key).encode()).hexdigest()}"


def _without_ir(library: tuple[str, str, tuple[bytes, bytes]], *others: Any) -> tuple[Any, ...]:
    """Leave the IR out of a reduced compilation: an entry point is never linked to other kernels.

    Numba takes from it which symbols the machine code defines, so these are left there.
    """
    name, kind, (machine_code, bitcode) = library
    module = llvmlite.binding.parse_bitcode(bitcode)
    symbols = [
        f'define void @"{each.name}"() {{ unreachable }}'
        for each in module.functions
        if not each.is_declaration
    ]
    symbols += [
        f'@"{each.name}" = global i8 0'
        for each in module.global_variables
        if not each.is_declaration
    ]
    stub = llvmlite.binding.parse_assembly("\n".join(symbols)).as_bitcode()
    return (name, kind, (machine_code, stub)), *others


def _read_trusted(path: Path) -> bytes | None:
    """Return a file's bytes; None if there is none, or if another user could have written it."""
    try:
        with path.open("rb") as file:
            if not _is_private(os.fstat(file.fileno())):
                _warn_refused(path.parent)
                return None
            return file.read()
    except OSError:
        return None


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file is this user's and nobody else may write to it."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the user's cache folder has an access list of its own
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and not others_write


@cache
def _warn_refused(folder: Path) -> None:
    _log.warning(
        "refused compiled kernels in %s: they belong to another user or can be written by others,"
        " and would be run as code; kernels are compiled again (remove that folder, or set"
        " MIDFILL_CACHE to a folder of your own)",
        folder,
    )
