"""What ARM's chips can do, by the code that LLVM makes for them.

LLVM lists few features of the chip that it runs on, but knows from its name which instructions it
has.
"""

from functools import cache
from typing import Any

from llvmlite.binding import Target, parse_assembly

_SUM_OF_BYTES = """
define i32 @sum(ptr %bytes) {
  %loaded = load <16 x i8>, ptr %bytes
  %widened = zext <16 x i8> %loaded to <16 x i32>
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %widened)
  ret i32 %sum
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""
"""A function that is a dot product with ones where the chip has the instruction."""


def has_dot_products(context: Any) -> bool:
    """Return whether the chip that kernels are compiled for has ARM's dot products of bytes."""
    return _makes_dot_products(*map(str, context.codegen().magic_tuple()))


@cache
def _makes_dot_products(triple: str, cpu: str, features: str) -> bool:
    if not triple.startswith(("aarch64", "arm64")):
        return False
    machine = Target.from_triple(triple).create_target_machine(cpu, features)
    module = parse_assembly(f'target triple = "{triple}"\n{_SUM_OF_BYTES}')
    return "udot" in machine.emit_assembly(module)
