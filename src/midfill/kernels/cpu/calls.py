"""Calls from one compiled function to another that is known only when the program runs.

The forward pass gets the address of a kernel, so that it runs inside the same call as everything
else. A kernel that few steps need is compiled by itself, when one first does. Those that every step
needs and that take long to compile are compiled beside the rest, on another core.
"""

from collections.abc import Callable, Sequence
from typing import Any

from numba import typeof, types
from numba.core import cgutils

from midfill.kernels.cpu.intrinsics import OWN, generated
from midfill.kernels.cpu.linking import compiling_together


def kernel_address(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the address of an entry point for ``call_kernel``, compiled for these arguments."""
    (address,) = kernel_addresses([(function, arguments)])
    return address


def kernel_addresses(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[int]:
    """Return the addresses of several entry points, compiled together, each for its arguments."""
    kernels: list[tuple[Any, Any]] = [
        (function, tuple(typeof(each) for each in arguments)) for function, arguments in calls
    ]
    addresses: list[int] = []
    with compiling_together(kernels):
        for kernel, signature in kernels:
            kernel.compile_here(signature)
            compiled = kernel.overloads[signature]
            name = compiled.fndesc.llvm_func_name
            addresses.append(compiled.library.get_pointer_to_function(name))
    return addresses


@generated(types.void, OWN, OWN)
def call_kernel(context: Any, builder: Any, kinds: Any, address: Any, arguments: Any) -> None:
    """Call the entry point at an address, which was compiled for arguments of these types."""
    taken = kinds[1].types
    function = context.call_conv.get_function_type(types.none, taken)
    callee = builder.inttoptr(address, function.as_pointer())
    unpacked = cgutils.unpack_tuple(builder, arguments)
    context.call_conv.call_function(builder, callee, types.none, taken, unpacked)
