"""How many operations all threads do per second in registers, by the type of numbers.

All threads work at once, since the clock falls when all cores do.
"""

import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

import midfill.kernels.cpu  # noqa: F401 - before Numba

# isort: split
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from midfill.kernels.cpu.bfloat16 import add_pair_products, has_pair_products
from midfill.kernels.cpu.dots import WORDS, add_products, multiply_pairs, pairs_in_int16
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.simd import (
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Codegen,
    broadcast,
    constant,
    fused_multiply_add,
    has_feature,
    integers,
)
from midfill.kernels.cpu.thread_pool import ThreadPool

_CHAINS = 16 if has_feature(cpu_target.target_context, "avx512f") else 6
"""Independent sums: enough to hide the latency of an instruction, and as many as fit registers."""
_BITS = 4
"""Of the weights whose products are measured."""
_ROUNDS = 500_000
_RUNS = 20


class ArithmeticProbe:
    """Threads that multiply and add."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPool(threads)
        self._sink = np.zeros((threads, LANES), np.float32)
        for function in (_add_codes, _add_pairs, _add_floats):  # compiles
            function(0, threads, self._pool.sync, 1, self._sink)

    def int8(self) -> float:
        """Return operations on int8 per second, two for each product that is added.

        They are those of the instructions in ``kernels.cpu.dots``; a chip's AMX does more.
        """
        return self._best(_add_codes, 8)

    def bfloat16(self) -> float:
        """Return operations on bfloat16 per second; 0 on chips that don't multiply it."""
        return self._best(_add_pairs, 4) if has_pair_products(cpu_target.target_context) else 0.0

    def float32(self) -> float:
        """Return operations on float32 per second."""
        return self._best(_add_floats, 2)

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _best(self, function: Callable[..., None], operations: int) -> float:
        """Return the rate of the fastest run, with so many operations per lane and step."""
        seconds = []
        for _ in range(_RUNS):
            started = time.perf_counter()
            self._pool.run(function, _ROUNDS, self._sink)
            seconds.append(time.perf_counter() - started)
        return operations * LANES * _CHAINS * _ROUNDS * self._threads / min(seconds)


@intrinsic  # type: ignore[untyped-decorator]
def _chained_codes(typing_context: Any, rounds: Any, seed: Any) -> tuple[Any, Codegen]:
    """Sum products of int8 in independent chains."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rounds, seed = arguments
        sums = [cgutils.alloca_once_value(builder, integers(0)) for _ in range(_CHAINS)]
        weights = broadcast(builder, seed)
        with cgutils.for_range(builder, rounds, intp=I64) as loop:
            # Another number each round, or the compiler would hoist the product out of the loop.
            x = broadcast(builder, builder.add(seed, builder.trunc(loop.index, I32)))
            for cell in sums:
                builder.store(_added(context, builder, builder.load(cell), weights, x), cell)
        return _first_lane(builder, sums, builder.add)

    return types.int32(types.intp, types.int32), codegen


def _added(context: Any, builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """Return sums with products added to them, in int16 where kernels have most of theirs.

    Those in int16 are products of the sums: LLVM would compute products of ``x`` once for all sums.
    """
    if not pairs_in_int16(context, _BITS):
        return add_products(context, builder, sums, weights, x)
    pairs = multiply_pairs(context, builder, weights, sums)
    return builder.bitcast(builder.add(builder.bitcast(sums, WORDS), pairs), I32_VECTOR)


@intrinsic  # type: ignore[untyped-decorator]
def _chained_pairs(typing_context: Any, rounds: Any, seed: Any) -> tuple[Any, Codegen]:
    """Sum products of pairs of bfloat16 in independent chains."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rounds, seed = arguments
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(_CHAINS)]
        pairs = broadcast(builder, seed)
        with cgutils.for_range(builder, rounds, intp=I64):
            for cell in sums:
                total = add_pair_products(context, builder, builder.load(cell), pairs, pairs)
                builder.store(total, cell)
        return _first_lane(builder, sums, builder.fadd)

    return types.float32(types.intp, types.int32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _chained_floats(typing_context: Any, rounds: Any, seed: Any) -> tuple[Any, Codegen]:
    """Sum products of float32 in independent chains."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rounds, seed = arguments
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(_CHAINS)]
        factor = broadcast(builder, seed)
        with cgutils.for_range(builder, rounds, intp=I64):
            for cell in sums:
                total = fused_multiply_add(builder, factor, factor, builder.load(cell))
                builder.store(total, cell)
        return _first_lane(builder, sums, builder.fadd)

    return types.float32(types.intp, types.float32), codegen


def _first_lane(builder: Any, cells: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Combine lane 0 of all sums, so that none of them is optimized away."""
    total = reduce(combine, [builder.load(cell) for cell in cells])
    return builder.extract_element(total, I32(0))


@kernel
def _add_codes(thread: int, threads: int, sync: Any, rounds: int, sink: Any) -> None:
    sink[thread, 0] = _chained_codes(rounds, np.int32(thread + 1))


@kernel
def _add_pairs(thread: int, threads: int, sync: Any, rounds: int, sink: Any) -> None:
    sink[thread, 1] = _chained_pairs(rounds, np.int32(0x3F803F80))


@kernel
def _add_floats(thread: int, threads: int, sync: Any, rounds: int, sink: Any) -> None:
    sink[thread, 2] = _chained_floats(rounds, np.float32(thread + 1))
