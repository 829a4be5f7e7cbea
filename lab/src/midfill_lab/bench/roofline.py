"""A chip's ceilings: bytes read and multiply-adds done per second.

Both are measured on all threads at once, since cores share the memory's bandwidth and their clock
falls when all of them work.
"""

import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import midfill.kernels.cpu  # noqa: F401 - before Numba

# isort: split
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from midfill.kernels.cpu.dots import WORDS, add_products, multiply_pairs, pairs_in_int16
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.simd import (
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Codegen,
    add,
    broadcast,
    constant,
    fused_multiply_add,
    has_feature,
    integers,
    load,
    splat,
    sum_lanes,
)
from midfill.kernels.cpu.thread_pool import ThreadPool

_BUFFER_BYTES = 512 * 2**20
"""Far more than any cache holds."""
_CHAINS = 16 if has_feature(cpu_target.target_context, "avx512f") else 6
"""Independent sums: enough to hide the latency of an instruction, and as many as fit registers."""
_BITS = 4
"""Of the weights whose products are measured."""
_ROUNDS = 1_000_000
_REPEATS = 5


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's ceilings.

    Attributes:
        bytes_per_second: read from memory.
        int8_per_second: operations on int8, two for each product that is added, by the
            instructions of ``kernels.cpu.dots``; a chip's AMX does more.
        float32_per_second: operations on float32, counted likewise.
    """

    bytes_per_second: float
    int8_per_second: float
    float32_per_second: float


def measure_roofline(threads: int) -> Roofline:
    """Measure for about 3 seconds on ``threads`` threads; each figure is the best of 5 runs."""
    buffer = np.ones(_BUFFER_BYTES // 4, np.float32)
    sink = np.zeros((threads, LANES), np.float32)
    lanes = 2 * LANES * _CHAINS * _ROUNDS * threads
    return Roofline(
        bytes_per_second=buffer.nbytes / _best(threads, _read, buffer, sink),
        int8_per_second=4 * lanes / _best(threads, _add_codes, _ROUNDS, sink),
        float32_per_second=lanes / _best(threads, _add_floats, _ROUNDS, sink),
    )


def _best(threads: int, function: Callable[..., None], *arguments: Any) -> float:
    """Return the seconds of the fastest run of a kernel on all threads."""
    pool = ThreadPool(threads)
    function(0, threads, pool.sync, *arguments)  # compiles
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        pool.run(function, *arguments)
        seconds.append(time.perf_counter() - started)
    pool.close()
    return min(seconds)


@kernel
def _read(thread: int, threads: int, sync: Any, buffer: npt.NDArray[np.float32], sink: Any) -> None:
    """Sum this thread's part of a buffer."""
    share = len(buffer) // threads // (4 * LANES) * (4 * LANES)
    first = second = third = fourth = splat(np.float32(0.0))
    for at in range(thread * share, (thread + 1) * share, 4 * LANES):
        first = add(first, load(buffer, at))
        second = add(second, load(buffer, at + LANES))
        third = add(third, load(buffer, at + 2 * LANES))
        fourth = add(fourth, load(buffer, at + 3 * LANES))
    sink[thread, 0] = sum_lanes(add(add(first, second), add(third, fourth)))


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
    sink[thread, 1] = _chained_codes(rounds, np.int32(thread + 1))


@kernel
def _add_floats(thread: int, threads: int, sync: Any, rounds: int, sink: Any) -> None:
    sink[thread, 2] = _chained_floats(rounds, np.float32(thread + 1))
