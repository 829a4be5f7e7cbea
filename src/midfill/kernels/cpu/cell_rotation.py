"""Keys that move to other positions, rotated on by the difference and rounded anew."""

import numpy as np

from midfill.kernels.cpu.jit import entry_point
from midfill.kernels.cpu.kv_cache import KVArray, is_quantized, load_entry, write_entry
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array
from midfill.kernels.cpu.simd import LANES, multiply, splat, store


@entry_point
def rotate_cells(
    thread: int, threads: int, sync: Int64Array,
    cells: Int32Array, turns: Int32Array, cos: Float32Array, sin: Float32Array, head_dim: int,
    keys: KVArray, scales: Float32Array, rotated: KVArray, rotated_scales: Float32Array,
    scratch: Float32Array,
) -> None:  # fmt: skip
    """Write the keys of some cells, rotated, to ``rotated``; run by all threads of a pool.

    Args:
        thread, threads, sync: see ``thread_pool``.
        cells: int32 [n], numbers of entries in ``keys``.
        turns: int32 [n], by which row of ``cos`` and ``sin`` each key turns.
        cos, sin: float32 [angles * head_dim / 2].
        head_dim: elements of a key.
        keys, scales: of the KV cache.
        rotated, rotated_scales: the same for n entries; what is written.
        scratch: float32 [threads * head_dim].
    """
    half, at = head_dim // 2, thread * head_dim
    for entry in range(len(cells) * thread // threads, len(cells) * (thread + 1) // threads):
        cell, angles = int(cells[entry]), int(turns[entry]) * half
        factor = splat(scales[cell] if is_quantized(keys) else np.float32(1.0))
        for d in range(0, head_dim, LANES):
            store(scratch, at + d, multiply(load_entry(keys, cell * head_dim + d), factor))
        for d in range(half):
            first, second = scratch[at + d], scratch[at + half + d]
            c, s = cos[angles + d], sin[angles + d]
            scratch[at + d] = first * c - second * s
            scratch[at + half + d] = second * c + first * s
        write_entry(scratch, at, head_dim, rotated, rotated_scales, entry)
