"""float16 in memory, float32 in registers: conversions for every chip.

Where a chip has no conversion, LLVM calls a runtime function that may not exist. Such chips
convert with integer arithmetic here, to the same bits.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.simd import (
    F16,
    F32,
    F32_VECTOR,
    I16,
    I32,
    I32_VECTOR,
    LANES,
    address,
    constant,
    has_feature,
    integers,
    load_unaligned,
)

F16_VECTOR = ir.VectorType(F16, LANES)
I16_VECTOR = ir.VectorType(I16, LANES)
LARGEST = 65504.0
"""The largest float16; larger numbers are stored as this."""
_INFINITY = 0x7C00 << 13
"""float16's infinity, shifted to float32's exponent and mantissa; NaNs are larger."""


def _native(context: Any) -> bool:
    """Return whether the chip converts float16 itself."""
    return has_feature(context, "f16c") or platform.machine() in ("aarch64", "arm64")


def load_halves(context: Any, builder: ir.IRBuilder, pointer: Any) -> Any:
    """Load 16 float16 from a pointer of any type, as float32."""
    if _native(context):
        return builder.fpext(load_unaligned(builder, pointer, F16_VECTOR), F32_VECTOR)
    bits = builder.zext(load_unaligned(builder, pointer, I16_VECTOR), I32_VECTOR)
    sign = builder.shl(builder.and_(bits, integers(0x8000)), integers(16))
    # The exponent's bias is 15 in float16 and 127 in float32; a product corrects it, also for
    # subnormals.
    magnitude = builder.shl(builder.and_(bits, integers(0x7FFF)), integers(13))
    scaled = builder.fmul(builder.bitcast(magnitude, F32_VECTOR), constant(2.0**112))
    # Infinity and NaN keep the largest exponent.
    special = builder.icmp_unsigned(">=", magnitude, integers(_INFINITY))
    largest = builder.or_(magnitude, integers(0x7F800000))
    result = builder.select(special, largest, builder.bitcast(scaled, I32_VECTOR))
    return builder.bitcast(builder.or_(result, sign), F32_VECTOR)


def store_halves(context: Any, builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    """Round 16 float32 to the nearest float16 (ties to even) and store them.

    Numbers too large for float16 become +-65504; NaN stays NaN.
    """
    # Compare and select: ``minnum`` would turn NaN into a number.
    for limit, beyond in ((LARGEST, ">"), (-LARGEST, "<")):
        outside = builder.fcmp_ordered(beyond, value, constant(limit))
        value = builder.select(outside, constant(limit), value)
    if _native(context):
        halves = builder.fptrunc(value, F16_VECTOR)
    else:
        halves = _round_by_integers(builder, value)
    instruction = builder.store(halves, builder.bitcast(pointer, halves.type.as_pointer()))
    instruction.align = 1


def _round_by_integers(builder: ir.IRBuilder, value: Any) -> Any:
    """Round 16 float32 to float16 with integer arithmetic; return 16 int16."""
    bits = builder.bitcast(value, I32_VECTOR)
    sign = builder.lshr(builder.and_(bits, integers(-(2**31))), integers(16))
    magnitude = builder.and_(bits, integers(0x7FFFFFFF))
    # Normal numbers: correct the exponent's bias and round off 13 bits.
    odd = builder.and_(builder.lshr(magnitude, integers(13)), integers(1))
    rounded = builder.add(builder.sub(magnitude, integers((112 << 23) - 0xFFF)), odd)
    normal = builder.lshr(rounded, integers(13))
    # Subnormal numbers: adding 1/2 makes the FPU round at 2^-24, float16's smallest step.
    shifted = builder.fadd(builder.bitcast(magnitude, F32_VECTOR), constant(0.5))
    subnormal = builder.sub(builder.bitcast(shifted, I32_VECTOR), integers(0x3F000000))
    small = builder.icmp_unsigned("<", magnitude, integers(113 << 23))
    result = builder.select(small, subnormal, normal)
    nan = builder.icmp_unsigned(">", magnitude, integers(0x7F800000))
    result = builder.or_(builder.select(nan, integers(0x7E00), result), sign)
    return builder.trunc(result, I16_VECTOR)


@generated(types.float32, OWN, INDEX)
def half_to_float(context: Any, builder: Any, kinds: Any, array: Any, offset: Any) -> Any:
    """Return the float16 at byte ``offset`` of a uint8 array, as float32."""
    pointer = address(context, builder, kinds[0], array, offset)
    half = builder.load(builder.bitcast(pointer, I16.as_pointer()))
    half.align = 1
    if _native(context):
        return builder.fpext(builder.bitcast(half, F16), F32)
    bits = builder.zext(half, I32)
    sign = builder.shl(builder.and_(bits, I32(0x8000)), I32(16))
    magnitude = builder.shl(builder.and_(bits, I32(0x7FFF)), I32(13))
    scaled = builder.fmul(builder.bitcast(magnitude, F32), F32(2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, I32(_INFINITY))
    largest = builder.or_(magnitude, I32(0x7F800000))
    result = builder.select(special, largest, builder.bitcast(scaled, I32))
    return builder.bitcast(builder.or_(result, sign), F32)
