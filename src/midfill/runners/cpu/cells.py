"""CpuCells: the CPU kernels' KV cache, cell by cell."""

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.kernels.cpu.kv_cache import KVArray, KVCache, read_cells, rotate_cells, write_cells
from midfill.kernels.cpu.memory import aligned_zeros
from midfill.kernels.cpu.thread_pool import ThreadPool
from midfill.runners.forward.cells import CellLayout, StoredCells, UInt8Array
from midfill.runners.rope import rotations

_DTYPES = {"float32": "f32", "uint16": "f16", "int16": "bf16", "int8": "i8", "uint8": "i4"}


class CpuCells:
    """Implements ``runners.forward.cells.CellStore``.

    Args:
        cache: the KV cache.
        head_dim: elements of a key or value.
        frequencies: float32 [layers, head_dim / 2], radians per position.
        pool: threads that convert and rotate.
    """

    def __init__(
        self, cache: KVCache, head_dim: int, frequencies: Float32Array, pool: ThreadPool
    ) -> None:
        self._head_dim = head_dim
        entries = cache.count_entries(head_dim)
        self._keys = cache.keys.reshape(entries, -1)
        self._values = cache.values.reshape(entries, -1)
        self._key_scales, self._value_scales = cache.key_scales, cache.value_scales
        self._has_scales = len(cache.key_scales) > 0
        self._shares = cache.values is cache.keys  # values are the keys, which are stored once
        self._frequencies = frequencies
        self._pool = pool
        self._scratch = aligned_zeros((pool.threads, head_dim), np.float32).reshape(-1)

    def read(self, cells: Int32Array) -> tuple[Float32Array, Float32Array]:
        """See ``CellStore.read``."""
        return self.read_keys(cells), self._read(self._values, self._value_scales, cells)

    def read_keys(self, cells: Int32Array) -> Float32Array:
        """See ``CellStore.read_keys``."""
        return self._read(self._keys, self._key_scales, cells)

    def write(self, cells: Int32Array, keys: Float32Array, values: Float32Array) -> None:
        """See ``CellStore.write``."""
        written = [(keys, self._keys, self._key_scales)]
        if not self._shares:
            written.append((values, self._values, self._value_scales))
        for numbers, entries, scales in written:
            self._pool.run(
                write_cells, np.ascontiguousarray(cells), self._head_dim,
                np.array(numbers, np.float32).reshape(-1), entries.reshape(-1), scales,
            )  # fmt: skip

    def take(
        self,
        cells: Int32Array,
        shift: Int32Array | None = None,
        layers: Int32Array | None = None,
    ) -> StoredCells:
        """See ``CellStore.take``."""
        if shift is None:
            keys, key_scales = self._keys[cells], self._scales_of(self._key_scales, cells)
        else:
            keys, key_scales = self._rotated(cells, shift, layers)
        if self._shares:
            return StoredCells((keys,))
        values = self._values[cells]
        if not self._has_scales:
            return StoredCells((keys, values))
        return StoredCells((keys, values, key_scales, self._scales_of(self._value_scales, cells)))

    def put(self, cells: Int32Array, stored: StoredCells) -> None:
        """See ``CellStore.put``."""
        for array, taken in zip(self._arrays(), stored.arrays, strict=True):
            array[cells] = taken

    @property
    def layout(self) -> CellLayout:
        """See ``CellStore.layout``."""
        widths = tuple(array[:1].nbytes for array in self._arrays())
        return CellLayout(_DTYPES[self._keys.dtype.name], widths)

    def dump(self, cells: Int32Array) -> tuple[UInt8Array, ...]:
        """See ``CellStore.dump``."""
        return tuple(_as_bytes(array[cells]) for array in self._arrays())

    def restore(self, cells: Int32Array, arrays: tuple[UInt8Array, ...]) -> None:
        """See ``CellStore.restore``."""
        for array, stored in zip(self._arrays(), arrays, strict=True):
            shape = (len(cells), *array.shape[1:])
            array[cells] = np.ascontiguousarray(stored).view(array.dtype).reshape(shape)

    def _read(self, entries: KVArray, scales: Float32Array, cells: Int32Array) -> Float32Array:
        """Return what the numbers of [n] cells stand for: float32 [n, head_dim]."""
        found = np.empty((len(cells), self._head_dim), np.float32)
        self._pool.run(
            read_cells, np.ascontiguousarray(cells), self._head_dim, entries.reshape(-1), scales,
            found.reshape(-1),
        )  # fmt: skip
        return found

    def _scales_of(self, scales: Float32Array, cells: Int32Array) -> Float32Array:
        return scales[cells] if self._has_scales else scales

    def _rotated(
        self, cells: Int32Array, shift: Int32Array, layers: Int32Array | None
    ) -> tuple[KVArray, Float32Array]:
        """Return the keys of cells, moved: entries [n, head_dim], and scales [n] if there are."""
        count, head_dim = len(cells), self._head_dim
        cos, sin, turns = rotations(shift, self._frequencies, layers)
        keys = np.empty((count, self._keys.shape[1]), self._keys.dtype)
        scales = np.empty(count if self._has_scales else 0, np.float32)
        self._pool.run(
            rotate_cells, cells, turns, cos.reshape(-1), sin.reshape(-1), head_dim,
            self._keys.reshape(-1), self._key_scales, keys.reshape(-1), scales, self._scratch,
        )  # fmt: skip
        return keys, scales

    def _arrays(self) -> list[KVArray]:
        if self._shares:
            return [self._keys]
        arrays = (self._keys, self._values, self._key_scales, self._value_scales)
        return [array for array in arrays if len(array)]


def _as_bytes(array: KVArray) -> UInt8Array:
    return array.reshape(len(array), -1).view(np.uint8)
