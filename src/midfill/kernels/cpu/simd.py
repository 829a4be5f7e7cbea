"""Vectors of 16 float32 lanes inside Numba functions.

Numba has no vector type, and LLVM may choose another order of summation for each loop that it
vectorises. Here a vector is a value of its own (``F32x16``), each operation is one LLVM vector
instruction, and the order of every sum is explicit. LLVM splits the 16 lanes into the chip's
registers (one of AVX-512, two of AVX, four of NEON or SSE), with the same result on every chip.

Offsets are in elements of their array.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated

LANES = 16

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
F32 = ir.FloatType()
I32_VECTOR = ir.VectorType(I32, LANES)
F32_VECTOR = ir.VectorType(F32, LANES)

Codegen = Callable[..., Any]


class F32x16(types.Type):
    """Numba type of a vector of 16 float32."""

    def __init__(self) -> None:
        super().__init__(name="F32x16")


f32x16 = F32x16()


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, data_model_manager: Any, front_end_type: Any) -> None:
        super().__init__(data_model_manager, front_end_type, F32_VECTOR)


# ---- building blocks of generated code -------------------------------------------------------


def integer(value: int) -> ir.Constant:
    """Return an int64 constant."""
    return ir.Constant(I64, value)


def integers(value: int) -> ir.Constant:
    """Return a vector constant with the same int32 in every lane."""
    return ir.Constant(I32_VECTOR, [value] * LANES)


def constant(value: float) -> ir.Constant:
    """Return a vector constant with the same float32 in every lane."""
    return ir.Constant(F32_VECTOR, [value] * LANES)


def address(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, offset: Any) -> Any:
    """Return a pointer to element ``offset`` of a one-dimensional contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def load_unaligned(builder: ir.IRBuilder, pointer: Any, vector: ir.VectorType) -> Any:
    """Load a vector from a pointer of any type and alignment."""
    value = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    value.align = 1
    return value


def store_unaligned(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    """Store a vector to a pointer of any type and alignment."""
    instruction = builder.store(value, builder.bitcast(pointer, value.type.as_pointer()))
    instruction.align = 1


_IMPLIED = {
    "amx-int8": ("amx-tile",),
    "avx512bf16": ("avx512bw",),
    "avx512vnni": ("avx512f",),
    "avx512bw": ("avx512f",),
    "avx512f": ("avx2", "f16c", "fma"),
    "avxvnni": ("avx2",),
    "avx2": ("avx",),
    "f16c": ("avx",),
    "fma": ("avx",),
}
"""Features that a chip with the feature on the left has too."""


@cache
def _with_implied(feature: str) -> frozenset[str]:
    return frozenset({feature}).union(
        *(_with_implied(other) for other in _IMPLIED.get(feature, ()))
    )


@cache  # compiling the forward pass asks 700 times
def enabled_features(settings: str) -> frozenset[str]:
    """Return the features that LLVM settings such as "+avx2,-fma" enable.

    They are read from left to right: + enables all that it implies, - disables all that implies it.
    """
    enabled: set[str] = set()
    for setting in settings.split(","):
        sign, feature = setting[:1], setting[1:]
        if sign == "+":
            enabled |= _with_implied(feature)
        elif sign == "-":
            enabled = {other for other in enabled if feature not in _with_implied(other)}
    return frozenset(enabled)


def has_feature(context: Any, name: str) -> bool:
    """Return whether the chip that kernels are compiled for has a feature, by LLVM's name."""
    return name in enabled_features(str(context.codegen().magic_tuple()[2]))


def register_vectors(context: Any) -> int:
    """Return how many vectors of 16 float32 a chip's registers hold: 32, or 8 without AVX-512."""
    return 32 if has_feature(context, "avx512f") else 8


def opaque(builder: ir.IRBuilder, value: Any) -> Any:
    """Return a pointer, or a vector of a register's size, as one that LLVM knows nothing about."""
    kind = "r" if isinstance(value.type, ir.PointerType) else "x"
    code = ir.InlineAsm(ir.FunctionType(value.type, [value.type]), "", f"={kind},0", True)
    return builder.call(code, [value])


def broadcast(builder: ir.IRBuilder, scalar: Any) -> Any:
    """Return a vector with a scalar, float32 or int32, in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, integers(0))


def for_known(
    builder: ir.IRBuilder, value: Any, known: Sequence[int], generate: Callable[[Any], None]
) -> None:
    """Generate code for each of the known values of an int64, as a constant, and for any other.

    Loops whose lengths are constants are unrolled, and their sums stay in registers.
    """
    if not known:
        generate(value)
        return
    is_first = builder.icmp_signed("==", value, integer(known[0]))
    with builder.if_else(is_first) as (then, otherwise):
        with then:
            generate(integer(known[0]))
        with otherwise:
            for_known(builder, value, known[1:], generate)


def llvm_call(builder: ir.IRBuilder, name: str, arguments: Sequence[Any], result: Any) -> Any:
    """Call an LLVM intrinsic by its full name."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, list(arguments))


def fused_multiply_add(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return llvm_call(builder, "llvm.fma.v16f32", [a, b, c], F32_VECTOR)


def larger(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Return the larger of a and b, lane by lane."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


class Sums:
    """rows x columns running sums of vectors, which LLVM keeps in registers; they start at 0.

    Attributes:
        places: where they are, [rows][columns] pointers.
    """

    def __init__(self, builder: ir.IRBuilder, rows: int, columns: int) -> None:
        self._builder = builder
        self.places = [
            [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(columns)]
            for _ in range(rows)
        ]
        self.clear()

    def clear(self) -> None:
        """Set all sums to 0."""
        for row in self.places:
            for total in row:
                self._builder.store(constant(0.0), total)

    def add(self, row: int, column: int, a: Any, b: Any) -> None:
        """Add a * b to a sum."""
        builder, total = self._builder, self.places[row][column]
        builder.store(fused_multiply_add(builder, a, b, builder.load(total)), total)

    def row(self, row: int) -> list[Any]:
        """Return a row's sums."""
        return [self._builder.load(total) for total in self.places[row]]

    def write(self, targets: Sequence[Any]) -> None:
        """Store each row's sums, one after the other, from one of the pointers on."""
        for row, target in enumerate(targets):
            for column, total in enumerate(self.row(row)):
                place = self._builder.gep(target, [integer(column * LANES)])
                store_unaligned(self._builder, total, place)


def row_pointers(builder: ir.IRBuilder, start: Any, stride: Any, rows: int) -> list[Any]:
    """Return pointers to rows that are ``stride`` elements apart."""
    return [builder.gep(start, [builder.mul(stride, integer(r))]) for r in range(rows)]


_EXP_COEFFICIENTS = (
    0.00829027210355784,
    0.041898159622795556,
    0.1666763812738243,
    0.49999147841084435,
    0.9999997063133107,
    1.0,
)
"""The polynomial of ``exponential``, highest power first."""


def tree_reduce(builder: ir.IRBuilder, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine lanes i and i + 8, then i and i + 4, ...: a fixed order on every chip."""
    undefined = ir.Constant(value.type, ir.Undefined)
    width = LANES // 2
    while width:
        lanes = [(lane + width) % LANES for lane in range(LANES)]
        moved = builder.shuffle_vector(value, undefined, ir.Constant(I32_VECTOR, lanes))
        value = combine(value, moved)
        width //= 2
    return builder.extract_element(value, ir.Constant(I32, 0))


def exponential(builder: ir.IRBuilder, x: Any) -> Any:
    """Return exp(x) to 2 units in the last place; exactly 1 at 0, and 0 below -87.336.

    exp(x) = 2^n * exp(r) with n = round(x / ln 2) and, for |r| <= ln 2 / 2, a polynomial of degree
    5, the minimax polynomial whose constant term is 1. Adding 1.5 * 2^23 rounds to a whole number
    and leaves it in the lowest bits.
    """
    low, high = constant(-87.336), constant(88.37)
    # Compare and select instead of ``minnum``: one instruction, and NaN does not matter.
    clamped = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    magic = constant(12582912.0)
    shifted = fused_multiply_add(builder, clamped, constant(1.44269504088896341), magic)
    n = builder.fsub(shifted, magic)
    r = fused_multiply_add(builder, n, constant(-0.693359375), clamped)
    r = fused_multiply_add(builder, n, constant(2.12194440e-4), r)
    polynomial = constant(_EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        polynomial = fused_multiply_add(builder, polynomial, r, constant(coefficient))
    # The result is normal, so adding n to its exponent is multiplying by 2^n.
    exponent = builder.shl(
        builder.bitcast(shifted, I32_VECTOR), ir.Constant(I32_VECTOR, [23] * LANES)
    )
    bits = builder.add(builder.bitcast(polynomial, I32_VECTOR), exponent)
    result = builder.bitcast(bits, F32_VECTOR)
    return builder.select(builder.fcmp_ordered("<", x, low), constant(0.0), result)


# ---- vector operations for Numba functions ---------------------------------------------------


@generated(f32x16, types.float32)
def splat(context: Any, builder: Any, kinds: Any, value: Any) -> Any:
    """Return a vector with ``value`` in every lane."""
    return broadcast(builder, value)


@generated(f32x16, OWN, INDEX)
def load(context: Any, builder: Any, kinds: Any, array: Any, offset: Any) -> Any:
    """Load lanes 0..15 from array[offset:offset + 16] (float32)."""
    pointer = address(context, builder, kinds[0], array, offset)
    return load_unaligned(builder, pointer, F32_VECTOR)


@generated(types.void, OWN, INDEX, f32x16)
def store(context: Any, builder: Any, kinds: Any, array: Any, offset: Any, value: Any) -> None:
    """Store array[offset:offset + 16] = value (float32)."""
    pointer = address(context, builder, kinds[0], array, offset)
    store_unaligned(builder, value, pointer)


def _binary(emit: Callable[[ir.IRBuilder, Any, Any], Any], doc: str) -> Any:
    def operation(context: Any, builder: Any, kinds: Any, a: Any, b: Any) -> Any:
        return emit(builder, a, b)

    operation.__doc__ = doc
    return generated(f32x16, f32x16, f32x16)(operation)


add = _binary(lambda builder, a, b: builder.fadd(a, b), "Return a + b, lane by lane.")
subtract = _binary(lambda builder, a, b: builder.fsub(a, b), "Return a - b, lane by lane.")
multiply = _binary(lambda builder, a, b: builder.fmul(a, b), "Return a * b, lane by lane.")
divide = _binary(lambda builder, a, b: builder.fdiv(a, b), "Return a / b, lane by lane.")
maximum = _binary(larger, "Return the larger of a and b, lane by lane.")


@generated(f32x16, f32x16, f32x16, f32x16, f32x16)
def where_larger(context: Any, builder: Any, kinds: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """Return x in lanes where a > b, and y in the others."""
    return builder.select(builder.fcmp_ordered(">", a, b), x, y)


@generated(f32x16, f32x16)
def absolute(context: Any, builder: Any, kinds: Any, value: Any) -> Any:
    """Return |value|, lane by lane."""
    return llvm_call(builder, "llvm.fabs.v16f32", [value], F32_VECTOR)


@generated(f32x16, f32x16, f32x16, f32x16)
def fma(context: Any, builder: Any, kinds: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once, lane by lane."""
    return fused_multiply_add(builder, a, b, c)


@generated(f32x16, f32x16)
def exp(context: Any, builder: Any, kinds: Any, x: Any) -> Any:
    """Return exp(x), lane by lane; see ``exponential``."""
    return exponential(builder, x)


@generated(types.float32, f32x16)
def first_lane(context: Any, builder: Any, kinds: Any, value: Any) -> Any:
    """Return lane 0."""
    return builder.extract_element(value, ir.Constant(I32, 0))


@generated(types.float32, f32x16)
def sum_lanes(context: Any, builder: Any, kinds: Any, value: Any) -> Any:
    """Return the sum of the 16 lanes, added as a balanced tree."""
    return tree_reduce(builder, value, builder.fadd)


@generated(types.float32, f32x16)
def max_lanes(context: Any, builder: Any, kinds: Any, value: Any) -> Any:
    """Return the largest of the 16 lanes."""
    return tree_reduce(builder, value, lambda a, b: larger(builder, a, b))


@generated(f32x16, f32x16, INDEX, INDEX, types.float32)
def keep_lanes(context: Any, builder: Any, kinds: Any, *arguments: Any) -> Any:
    """Return lanes first <= i < end of ``value``, and ``other`` elsewhere."""
    value, first, end, other = arguments
    indices = ir.Constant(I32_VECTOR, list(range(LANES)))

    low, high = (broadcast(builder, builder.trunc(bound, I32)) for bound in (first, end))
    inside = builder.and_(
        builder.icmp_signed(">=", indices, low),
        builder.icmp_signed("<", indices, high),
    )
    return builder.select(inside, value, broadcast(builder, other))


@generated(types.float32, OWN, INDEX)
def float_at(context: Any, builder: Any, kinds: Any, array: Any, offset: Any) -> Any:
    """Return the float32 at byte ``offset`` of a uint8 array."""
    pointer = address(context, builder, kinds[0], array, offset)
    value = builder.load(builder.bitcast(pointer, F32.as_pointer()))
    value.align = 1
    return value
