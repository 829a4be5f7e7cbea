"""bfloat16, the upper half of a float32: rounding, and sums of products of pairs.

A *pair* is two neighbouring bfloat16 in a word of 32 bits, the first one in the lower half. Words
lie in float32 arrays, so that queries, weights and panels share a thread's float32 memory; offsets
count words. AVX512-BF16 multiplies 16 pairs with 16 others and adds both products of each, one
after the other, each rounded once as by a fused multiply-add. Chips without it do the same in
float32, to the same bits (but for results below 1.2e-38, which the instruction takes for 0).
"""

from typing import Any

from llvmlite import ir
from numba import types

from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.simd import (
    F32_VECTOR,
    I16,
    I32,
    I32_VECTOR,
    LANES,
    address,
    constant,
    f32x16,
    fused_multiply_add,
    has_feature,
    integers,
    llvm_call,
    load_unaligned,
    store_unaligned,
)

LARGEST = 3.3895313892515355e38
"""The largest bfloat16; larger numbers are stored as this."""

_I16_VECTOR = ir.VectorType(I16, LANES)
_UPPER = -(1 << 16)
_ONES = 0x3F803F80
"""A pair of ones."""


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def has_pair_products(context: Any) -> bool:
    """Return whether the chip that kernels are compiled for multiplies bfloat16."""
    return has_feature(context, "avx512bf16")


def load_bfloat16s(builder: ir.IRBuilder, pointer: Any) -> Any:
    """Load 16 bfloat16 from a pointer of any type, as float32."""
    bits = builder.zext(load_unaligned(builder, pointer, _I16_VECTOR), I32_VECTOR)
    return builder.bitcast(builder.shl(bits, integers(16)), F32_VECTOR)


def store_bfloat16s(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    """Round 16 float32 to the nearest bfloat16 (ties to even) and store them.

    Infinity becomes the largest bfloat16; NaN stays NaN.
    """
    for limit, beyond in ((LARGEST, ">"), (-LARGEST, "<")):
        outside = builder.fcmp_ordered(beyond, value, constant(limit))
        value = builder.select(outside, constant(limit), value)
    rounded = builder.trunc(builder.lshr(_rounded(builder, value), integers(16)), _I16_VECTOR)
    store_unaligned(builder, rounded, pointer)


def _rounded(builder: ir.IRBuilder, value: Any) -> Any:
    """Return 16 int32 whose upper halves are the numbers rounded to bfloat16."""
    bits = builder.bitcast(value, I32_VECTOR)
    odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    nearest = builder.add(builder.add(bits, integers(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, integers(0x7FC00000), nearest)


def round_to_pairs(context: Any, builder: ir.IRBuilder, first: Any, second: Any) -> Any:
    """Return 16 words with 32 numbers rounded to bfloat16: those of ``first``, then ``second``."""
    if has_pair_products(context):
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return builder.bitcast(llvm_call(builder, name, [second, first], _BFLOATS), I32_VECTOR)
    words = ir.VectorType(I16, 2 * LANES)
    halves = [builder.bitcast(_rounded(builder, each), words) for each in (first, second)]
    upper = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(1, 4 * LANES, 2)))
    return builder.bitcast(builder.shuffle_vector(*halves, upper), I32_VECTOR)


def add_pair_products(context: Any, builder: ir.IRBuilder, total: Any, a: Any, b: Any) -> Any:
    """Add to each float32 of ``total`` the two products of a pair of ``a`` with one of ``b``.

    Args:
        total: float32 vector.
        a, b: vectors of 16 words.
    """
    if has_pair_products(context):
        operands = [total, *(builder.bitcast(each, _BFLOATS) for each in (a, b))]
        return llvm_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", operands, F32_VECTOR)
    # In the instruction's order: the second numbers of the pairs come first.
    a_upper, b_upper = (
        builder.bitcast(builder.and_(each, integers(_UPPER)), F32_VECTOR) for each in (a, b)
    )
    a_lower, b_lower = (
        builder.bitcast(builder.shl(each, integers(16)), F32_VECTOR) for each in (a, b)
    )
    total = fused_multiply_add(builder, a_upper, b_upper, total)
    return fused_multiply_add(builder, a_lower, b_lower, total)


@generated(f32x16, OWN, INDEX)
def load_pairs(context: Any, builder: Any, kinds: Any, array: Any, word: Any) -> Any:
    """Load the 16 bfloat16 of 8 words of a float32 array, as float32."""
    pointer = address(context, builder, kinds[0], array, word)
    return load_bfloat16s(builder, pointer)


@generated(types.void, OWN, INDEX, f32x16)
def store_pairs(context: Any, builder: Any, kinds: Any, array: Any, word: Any, value: Any) -> None:
    """Round 16 numbers to bfloat16 and store them in 8 words of a float32 array."""
    pointer = address(context, builder, kinds[0], array, word)
    store_bfloat16s(builder, value, pointer)


@generated(f32x16, OWN, INDEX, f32x16, f32x16, f32x16)
def store_weights(context: Any, builder: Any, kinds: Any, *arguments: Any) -> Any:
    """Round 32 weights, store them in 16 words of an array and add them, as rounded, to a total.

    Lane i of the total takes weights 2i + 1 and 2i.
    """
    array, word, first, second, total = arguments
    pairs = round_to_pairs(context, builder, first, second)
    pointer = address(context, builder, kinds[0], array, word)
    store_unaligned(builder, pairs, pointer)
    return add_pair_products(context, builder, total, pairs, integers(_ONES))
