"""Calls from one compiled function to another that is known only when the program runs.

A kernel that few steps need is compiled by itself, when one first does. The forward pass then gets
its address, so that it runs inside the same call as everything else, and costs a comparison where
it isn't needed.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from midfill.kernels.cpu.simd import Codegen


def kernel_address(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the address of an entry point for ``call_kernel``, compiled for these arguments."""
    dispatcher: Any = function
    signature = tuple(dispatcher.typeof_pyval(argument) for argument in arguments)
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    name = compiled.fndesc.llvm_func_name
    address: int = compiled.library.get_pointer_to_function(name)
    return address


@intrinsic  # type: ignore[untyped-decorator]
def call_kernel(typing_context: Any, address: Any, arguments: Any) -> tuple[Any, Codegen]:
    """Call the entry point at an address, which was compiled for arguments of these types."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args[1].types
        function = context.call_conv.get_function_type(types.none, kinds)
        callee = builder.inttoptr(values[0], function.as_pointer())
        unpacked = cgutils.unpack_tuple(builder, values[1])
        context.call_conv.call_function(builder, callee, types.none, kinds, unpacked)
        return context.get_dummy_value()

    return types.void(address, arguments), codegen
