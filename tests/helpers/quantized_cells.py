"""Cells of a KV cache that a quantised block fills, for tests of kernels."""

import numpy as np

from midfill.kernels.cpu.kv_cache import KVCache, KVCacheDtype
from midfill.kernels.cpu.parts.block_bytes import BlockBytes, are_consecutive
from midfill.kv.quantized import QuantizedBlock, QuantizedVectors, cell_arrays
from midfill.kv.quantized_layout import STREAM_FIELDS

CELLS = 700


def placed(one: QuantizedVectors, *, scattered: bool) -> tuple[BlockBytes, np.ndarray]:
    """A block whose keys they are, in a KV cache of float16, and its fields."""
    dim = one.codes.shape[1]
    cache = KVCache.allocate(KVCacheDtype.F16, CELLS, dim)
    block = QuantizedBlock.of(one, one)
    count = block.cells(4 * dim)
    cells = np.arange(7, 7 + count, dtype=np.int32)
    if scattered:
        cells = np.random.default_rng(count).permutation(CELLS)[:count].astype(np.int32)
    parts = cell_arrays([block], 4 * dim)
    for array, part in zip((cache.keys, cache.values), parts, strict=True):
        array.reshape(CELLS, dim)[cells] = np.ascontiguousarray(part).view(np.uint16)
    fields = np.array(block.fields[:STREAM_FIELDS], np.int32)
    return BlockBytes(cache, cells, count, 2 * dim, are_consecutive(cells, count)), fields
