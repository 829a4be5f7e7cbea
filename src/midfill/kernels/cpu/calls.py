"""Calls from one compiled function to another that is known only when the program runs.

A kernel that few steps need is compiled by itself, when one first does. The forward pass then gets
its address, so that it runs inside the same call as everything else, and costs a comparison where
it isn't needed.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils

from midfill.kernels.cpu.intrinsics import OWN, generated


def kernel_address(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the address of an entry point for ``call_kernel``, compiled for these arguments."""
    dispatcher: Any = function
    signature = tuple(dispatcher.typeof_pyval(argument) for argument in arguments)
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    name = compiled.fndesc.llvm_func_name
    address: int = compiled.library.get_pointer_to_function(name)
    return address


@generated(types.void, OWN, OWN)
def call_kernel(context: Any, builder: Any, kinds: Any, address: Any, arguments: Any) -> None:
    """Call the entry point at an address, which was compiled for arguments of these types."""
    taken = kinds[1].types
    function = context.call_conv.get_function_type(types.none, taken)
    callee = builder.inttoptr(address, function.as_pointer())
    unpacked = cgutils.unpack_tuple(builder, arguments)
    context.call_conv.call_function(builder, callee, types.none, taken, unpacked)
