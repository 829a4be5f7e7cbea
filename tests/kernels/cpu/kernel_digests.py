"""Program that runs each kernel on fixed inputs, for test_chips.py.

Prints JSON: a digest of each kernel's results, and which instructions the machine code uses. With
the argument "code" it only compiles the products, for the chip that Numba was told.
"""

import hashlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numba import typeof

sys.path.append(str(Path(__file__).parents[2] / "helpers"))
from ggml_blocks import random_matrix, with_largest_quants

from midfill.kernels.cpu import attention, attention_metadata, linear
from midfill.kernels.cpu.activations import ACTIVATION_BLOCK_BYTES, Activations, quantize_row
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.halves import half_to_float
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_cache import (
    KVCache,
    KVCacheDtype,
    LayerKV,
    allocate_kv,
    load_entry,
    write_entry,
)
from midfill.kernels.cpu.packing import PackedMatrix, pack
from midfill.kernels.cpu.panel_products import MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.ragged_cells import pack_ragged
from midfill.kernels.cpu.rows import LAYER, RMS, NormWeights, RopeTables, norm, rotate
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.simd import exp, load, store
from midfill.kernels.cpu.softmax import SoftmaxSums
from midfill.kernels.cpu.standby import sync_size
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.tiles import even_tile_rows
from midfill.kernels.cpu.weight_formats import LAYOUTS, WeightFormat
from midfill.kv.ragged import KeyTerms, RaggedIndex
from midfill.stored_tensor import StoredTensor

INSTRUCTIONS = ("zmm", "ymm", "vpdpbusd", "pmaddubsw", "pmulld", "vfmadd", "vcvtph2ps")
"""Instructions and registers looked for in machine code."""

FORMATS = (*LAYOUTS, WeightFormat.F32)
"""Those that ``linear`` knows."""

multiply = kernel(linear.linear.py_func)
"""``linear`` without its cache on disk, which holds no assembly."""

rng = np.random.default_rng(0)
NO_BYTES = np.zeros(0, np.uint8)
WIDTH = 512
"""Inputs: several blocks of every format."""
MATRIX = rng.normal(size=(70, WIDTH)).astype(np.float32)


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@kernel
def _read_halves(halves, data, vectors, scalars):  # type: ignore[no-untyped-def]
    for at in range(0, len(halves), 16):
        store(vectors, at, load_entry(halves, at))
    for i in range(len(halves)):
        scalars[i] = half_to_float(data, 2 * i)


@kernel
def _elementwise(x, exponentials, silu, gelu):  # type: ignore[no-untyped-def]
    for at in range(0, len(x), 16):
        store(exponentials, at, exp(load(x, at)))
        store(silu, at, linear.activate(load(x, at), linear.SILU))
        store(gelu, at, linear.activate(load(x, at), linear.GELU_TANH))


def halves_read() -> list[np.ndarray]:
    """Read all float16 numbers; NaNs are made one and the same."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    out = [np.empty(len(halves), np.float32) for _ in range(2)]
    _read_halves(halves, halves.view(np.uint8), *out)
    np.testing.assert_array_equal(*out)
    for values in out:
        values[np.isnan(values)] = np.nan
    return out


def entries_written(kv_cache_dtype: KVCacheDtype) -> list[np.ndarray]:
    exponents = np.arange(-30, 17).repeat(32)
    x = normal(len(exponents)) * np.float32(2.0) ** exponents.astype(np.float32)
    # Ties between halves, what no half can hold, subnormals, zeros.
    ties = np.arange(0, 1 << 15, 97, dtype=np.uint16)[: 9 * 32].view(np.float16).astype(np.float32)
    ties += np.spacing(ties.astype(np.float16)).astype(np.float32) / 2
    special = np.zeros(32, np.float32)
    if kv_cache_dtype in (KVCacheDtype.F16, KVCacheDtype.BF16):
        special[:6] = np.inf, -np.inf, np.nan, 65520.0, 1e-8, -0.0
    x = np.concatenate([x, ties, special])
    entries, scales = allocate_kv(kv_cache_dtype, len(x) // 32, 32)
    for entry in range(len(x) // 32):
        write_entry(x, entry * 32, 32, entries, scales, entry)
    return [entries, scales]


def rows_quantized() -> list[np.ndarray]:
    x = normal(64 * 32) * np.repeat(np.float32(10.0) ** np.arange(-32, 32), 32).astype(np.float32)
    x[:32] = 0.0
    blocks = np.zeros(64 * ACTIVATION_BLOCK_BYTES, np.uint8)
    quantize_row(x, 0, len(x), blocks, 0)
    return [blocks]


def rows_normed() -> list[np.ndarray]:
    x, weight, bias = normal(160), normal(160), normal(160)
    out = np.zeros((2, 160), np.float32)
    for kind in (RMS, LAYER):
        norm(x, 0, NormWeights(weight, bias, 160, kind, 1e-5), 0, out[kind], 0)
    return [out]


def heads_rotated() -> list[np.ndarray]:
    angles = normal(7 * 32)
    x = normal(64)
    rotate(x, 0, RopeTables(np.cos(angles), np.sin(angles), 32, np.zeros(1, np.int32)), 0, 5)
    return [x]


def functions() -> list[np.ndarray]:
    x = np.concatenate([np.linspace(-90, 90, 16_000, dtype=np.float32), normal(16_000)])
    x[:2] = -np.inf, 0.0
    out = [np.empty_like(x) for _ in range(3)]
    _elementwise(x, *out)
    return out


def one_thread() -> ThreadContext:
    return ThreadContext(0, 1, np.zeros(sync_size(1), np.int64), np.zeros((1, 16), np.int64))


def linear_weights(matrix: PackedMatrix, bias: np.ndarray) -> linear.LinearWeights:
    return linear.LinearWeights(matrix.data, matrix.panels, bias, matrix.outputs, matrix.inputs)


def packed(weight_format: WeightFormat) -> PackedMatrix:
    """Return a matrix [70, WIDTH] of that format; its last 35 rows are of the largest quants."""
    if weight_format is WeightFormat.F32:
        tensor = StoredTensor("w", MATRIX.shape, "f32", MATRIX)
    else:
        tensor = random_matrix(weight_format.name.lower(), 70, WIDTH)
        largest = with_largest_quants(tensor)
        tensor = replace(tensor, data=np.concatenate([tensor.data[:35], largest.data[35:]]))
    return pack([tensor], [weight_format])


def linear_arguments(weight_format: WeightFormat, rows: int, x: np.ndarray) -> tuple[Any, ...]:
    """Arguments of ``linear`` for some of the rows x[11, WIDTH]; its output is the sixth."""
    matrix = packed(weight_format)
    blocks = np.zeros(x.size // 32 * ACTIVATION_BLOCK_BYTES, np.uint8)
    quantize_row(x.reshape(-1), 0, x.size, blocks, 0)
    dense = weight_format is WeightFormat.F32
    tile_rows = even_tile_rows(linear.MAX_TILE_ROWS if dense else MAX_QUANTIZED_ROWS)
    return (
        one_thread(),
        Activations(x.reshape(-1), blocks),
        0,
        linear_weights(matrix, np.linspace(-1, 1, 96, dtype=np.float32)),
        0,
        linear.LinearOutput(
            np.zeros(rows * 96, np.float32), rows, 96, False, 1.0, np.zeros(0, np.float32), False
        ),
        linear.Tiling(tile_rows, np.empty(linear.PRODUCTS_SIZE, np.float32)),
    )


def products(weight_format: WeightFormat) -> list[np.ndarray]:
    """Compute any number of rows: 1 to 8 in one tile or two, and more than that."""
    x = normal(11, WIDTH)
    x[5] *= 1e-3
    x[10] = np.sign(x[10])
    results = []
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11):
        arguments = linear_arguments(weight_format, rows, x)
        multiply(*arguments)
        results.append(arguments[5].values)
    return results


def embeddings() -> list[np.ndarray]:
    results = []
    for weight_format in FORMATS:
        weights = linear_weights(packed(weight_format), np.zeros(0, np.float32))
        for token in (0, 20, 39):
            results.append(np.zeros(WIDTH, np.float32))
            embed(token, weights, 1.5, results[-1], 0)
    return results


def cells_with_terms(count: int) -> RaggedIndex:
    """Return cells of one layer and head, each with its terms."""
    terms = KeyTerms(normal(count), normal(count), normal(count))
    return RaggedIndex(np.arange(count, dtype=np.int32), np.array([0, count], np.int32), terms)


def attended(kv_cache_dtype: KVCacheDtype) -> list[np.ndarray]:
    """Attend with several heads per KV head: keys in place (1, 3 rows) and transposed (9).

    With slots alone, then with cells before them that have terms.
    """
    dim, slots = 96, 300
    cache = KVCache.allocate(kv_cache_dtype, slots, dim)
    for entries, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        values = normal(slots * dim)
        for slot in range(slots):
            write_entry(values, slot * dim, dim, entries, scales, slot)
    none = np.zeros(0, np.float32)
    order = rng.permutation(slots).astype(np.int32)
    results = []
    for rows, indices in itertools.product((1, 3, 9), ([], [cells_with_terms(40)])):
        ragged, _ = pack_ragged(indices)
        tiles = np.zeros((2, attention_metadata.TILE_FIELDS), np.int32)
        tiles[0] = 0, 0, 1, 0
        metadata = attention_metadata.AttentionMetadata(
            np.array([0, 1], np.int32), np.array([0, slots], np.int32), order,
            np.zeros(0, np.int32), tiles, 1, 0, ragged,
        )  # fmt: skip
        out = np.zeros(rows * dim, np.float32)
        attention.attend(
            one_thread(), attention.Queries(normal(rows * dim), rows * dim),
            LayerKV(cache, slots, 0),
            attention_metadata.AttentionHeads(rows, 1, rows, dim, 0.1, 0), metadata,
            Activations(out, NO_BYTES), np.zeros(attention.scratch_size(rows, dim), np.float32),
            np.zeros(2 * SEGMENT, np.int32), SoftmaxSums(none, none),
        )  # fmt: skip
        results.append(out)
    return results


def digest(arrays: list[np.ndarray]) -> str:
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.tobytes())
    return whole.hexdigest()[:16]


def instructions() -> list[str]:
    """Return which of INSTRUCTIONS the products use."""
    (code,) = multiply.inspect_asm().values()
    return [name for name in INSTRUCTIONS if name in code]


def main() -> None:
    if sys.argv[1:] == ["code"]:
        arguments = linear_arguments(WeightFormat.Q8_0, 1, normal(11, WIDTH))
        multiply.compile(tuple(typeof(argument) for argument in arguments))
        print(json.dumps({"instructions": instructions()}))
        return
    results = {
        "halves read": digest(halves_read()),
        "halves written": digest(entries_written(KVCacheDtype.F16)),
        "bfloat16 written": digest(entries_written(KVCacheDtype.BF16)),
        "quants written": digest(entries_written(KVCacheDtype.I8)),
        "rows quantized": digest(rows_quantized()),
        "norms": digest(rows_normed()),
        "rotary embedding": digest(heads_rotated()),
        "exponential, SiLU, GELU": digest(functions()),
        "embeddings": digest(embeddings()),
        "attention": digest(attended(KVCacheDtype.F16)),
        "attention in bfloat16": digest(attended(KVCacheDtype.BF16)),
        "attention in four bits": digest(attended(KVCacheDtype.I4)),
    }
    for weight_format in FORMATS:
        results[f"products {weight_format.name}"] = digest(products(weight_format))
    print(json.dumps({"digests": results, "instructions": instructions()}))


if __name__ == "__main__":
    main()
