"""Compilation of the kernels: Numba's options, and a cache that follows the source.

All kernels are compiled into a few entry points. So their folder is named by a digest of all
kernels' source, and a changed kernel never uses a stale compilation. Kernels in a package of their
own below this one, which few users need, are kept apart: their digest covers these kernels and that
package, so a change there compiles nothing else anew.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
from numba.extending import overload

from midfill.kernels.cpu.compiled import CompiledCache
from midfill.kernels.cpu.linking import Kernel, LinkedCompiler
from midfill.system.cache import cache_folder

F = TypeVar("F", bound=Callable[..., Any])


@cache
def compiled_folder(package: Path | None = None) -> Path:
    """Return the folder of this version's compiled kernels in the user's cache.

    Args:
        package: folder of kernels that are kept apart; None is that of this file.
    """
    own = Path(__file__).parent
    # Kernels take the layout of what they read, constants, from there.
    layouts = own.parents[1] / "kv" / "quantized_layout.py"
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for folder in (own,) if package in (None, own) else (own, package):
        for source in (*sorted(folder.glob("*.py")), layouts):
            digest.update(source.read_bytes())
    return cache_folder() / "kernels" / digest.hexdigest()[:16]


# Numba lets a function that is first compiled for a call in an inlined one be inlined everywhere,
# unless its own options say whether it is.
_OPTIONS = {
    "nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False,
    "forceinline": False,
}  # fmt: skip


def _compiled(function: F, *, makes_arrays: bool = False, inline: bool = False) -> F:
    compiled: Any = Kernel(function, _OPTIONS | {"_nrt": makes_arrays, "forceinline": inline})
    return compiled


def kernel(function: F) -> F:
    """Compile with Numba: without the GIL, IEEE arithmetic as written (no reassociation).

    ``error_model="numpy"`` leaves out the checks for division by zero. A kernel allocates no
    arrays, so it does without Numba's runtime and its reference counts, which all threads would
    write to at every call. The caller keeps the arrays alive.
    """
    return _compiled(function)


def inlined_kernel(function: F) -> F:
    """Compile like ``kernel``, always inlined: for small functions that take many arrays.

    An array is passed as seven words, so a call can take longer than what it does.
    """
    return _compiled(function, inline=True)


def optimized_first(function: F) -> F:
    """Let a kernel be optimised by itself before it is linked to its callers, and again with them.

    LLVM orders the loads of a product's loops differently then, which reads weights from memory a
    few percent faster on chips with AVX-512.
    """
    compiled: Any = function
    compiled.optimize_first()
    return function


def kernel_by_type(choose: Callable[..., Any]) -> Any:
    """Make a function for kernels to call: only the variant that a call needs is compiled, inlined.

    Args:
        choose: returns a kernel, given the Numba types of a call's arguments.
    """

    def chosen(*_: Any) -> Any:
        raise TypeError("only kernels can call this function")

    def implementation(*kinds: Any) -> Any:
        return choose(*kinds).py_func

    options = _OPTIONS | {"forceinline": True, "pipeline_class": LinkedCompiler}
    overload(chosen, jit_options=options, strict=False)(implementation)
    return chosen


def kernel_by_number(kernels: Mapping[int, Callable[..., Any]]) -> Any:
    """Make an inlined kernel that calls the one of several that its first argument names.

    Numbers are compared in the order of ``kernels``, the most likely first; the last one is called
    for all others. Every kernel returns nothing and takes the arguments after the number.
    """
    *compared, last = kernels
    # One function of many branches: a nest of functions would be compiled as often as it is deep.
    lines = ["def call(number, *arguments):"]
    for number in compared:
        lines += [f"    if number == {number}:", f"        return kernel_{number}(*arguments)"]
    lines.append(f"    return kernel_{last}(*arguments)")
    names: dict[str, Any] = {f"kernel_{number}": each for number, each in kernels.items()}
    exec("\n".join(lines), names)
    return inlined_kernel(names["call"])


def entry_point(function: F) -> F:
    """Compile like ``kernel``, cached on disk between processes."""
    compiled: Any = kernel(function)
    package = Path(inspect.getfile(function)).parent
    compiled._cache = CompiledCache(function, compiled_folder(package))
    return compiled


def compiled_for(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Return an entry point compiled for the types of ``arguments``, compiling it if needed.

    It takes arguments of these very types only, and doesn't check them. A compiled function by
    itself looks at the types of all its arguments in every call: of a decoder's hundred arrays, for
    80 µs.
    """
    dispatcher: Any = function
    compiled: Callable[..., Any] = dispatcher.compile(
        tuple(dispatcher.typeof_pyval(argument) for argument in arguments)
    )
    return compiled


def allocating_entry_point(function: F) -> F:
    """Compile like ``entry_point`` a function that allocates arrays."""
    compiled: Any = _compiled(function, makes_arrays=True)
    compiled._cache = CompiledCache(function, compiled_folder(), makes_arrays=True)
    return compiled


def in_child(function: F) -> F:
    """Let an entry point that takes seconds to compile be compiled in a process of its own.

    The memory that LLVM has taken meanwhile, up to hundreds of megabytes, ends with that process.
    """
    compiled: Any = function
    compiled.in_child = True
    return cast(F, compiled)
