"""Compiled kernels on disk: a file each, for any number of processes, signatures and chips.

Numba's own cache is not used. It keeps an index of a function's compilations, and two processes
that compile at once can leave its entries pointing at each other's code, of another signature or
for another chip; a file that was cut short ends the program; and it keeps code beside the source
or in the home folder where the folder it was told to use can't be written, however old that code
is. Here the name of a file says what is in it, and a digest in front that it is whole.
"""

import hashlib
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from midfill.system.cache import forget_unused, keep, mark_used

_DIGEST_BYTES = hashlib.sha256().digest_size


class CompiledCache:
    """What one function was compiled to; takes the place of ``numba.core.caching.Cache``.

    Args:
        function: the Python function.
        folder: where the files are. Its name has to change with the source of all functions
            that this one calls; the function's own file is looked after here.
    """

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._name = function.__qualname__
        self._folder = folder
        self._source = hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()

    @property
    def cache_path(self) -> str:
        """The folder, for Numba's statistics."""
        return str(self._folder)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The function compiled for a signature and this chip; None where it isn't there."""
        target_context.refresh()
        path = self._path(signature, target_context.codegen())
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() != digest:
            return None  # cut short or damaged: compiled again and replaced
        mark_used(self._folder)
        return CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a compilation, if the folder can be written."""
        if compiled.library.has_dynamic_globals:
            return  # it holds addresses of this process
        code = dumps(compiled._reduce())
        stored = hashlib.sha256(code).digest() + code
        keep(self._path(signature, compiled.codegen), lambda path: _write(path, stored))
        forget_unused(self._folder.parent)

    def _path(self, signature: Any, codegen: Any) -> Path:
        """The file of a signature on this chip; Python's version is part, as code is pickled."""
        key = (str(signature), codegen.magic_tuple(), sys.implementation.cache_tag, self._source)
        return self._folder / f"{self._name}-{hashlib.sha256(repr(key).encode()).hexdigest()}"


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
