"""Calls from one compiled function to another that is known only when the program runs.

The forward pass gets the address of a kernel, so that it runs inside the same call as everything
else. A kernel that few steps need is compiled by itself, when one first does. Those that every step
needs and that take long to compile are compiled beside the rest, on another core.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from numba import typeof, types
from numba.core import cgutils

from midfill.kernels.cpu.intrinsics import OWN, generated
from midfill.kernels.cpu.linking import compiling_in_children

EntryCall = tuple[Callable[..., Any], tuple[Any, ...]]
"""An entry point, and arguments of the types to compile it for."""


def compile_side_by_side(*groups: Sequence[EntryCall]) -> None:
    """Compile entry points or load them, where children compile them each group by one of its own.

    Entry points that have much in common belong in one group.
    """
    kernels: list[list[tuple[Any, Any]]] = [
        [(function, _signature(arguments)) for function, arguments in calls] for calls in groups
    ]
    with compiling_in_children(kernels):
        for kernel, signature in chain.from_iterable(kernels):
            kernel.compile_here(signature)


def kernel_address(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the address of an entry point for ``call_kernel``, compiled for these arguments."""
    dispatcher: Any = function
    signature = _signature(arguments)
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


def _signature(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(typeof(argument) for argument in arguments)


@generated(types.void, OWN, OWN)
def call_kernel(context: Any, builder: Any, kinds: Any, address: Any, arguments: Any) -> None:
    """Call the entry point at an address, which was compiled for arguments of these types."""
    taken = kinds[1].types
    function = context.call_conv.get_function_type(types.none, taken)
    callee = builder.inttoptr(address, function.as_pointer())
    unpacked = cgutils.unpack_tuple(builder, arguments)
    context.call_conv.call_function(builder, callee, types.none, taken, unpacked)
