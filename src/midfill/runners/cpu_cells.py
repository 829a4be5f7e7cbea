"""CpuCells: the CPU kernels' KV cache, cell by cell."""

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.kernels.cpu.kv_cache import KVArray, KVCache
from midfill.runners.key_rotation import shift_keys

_LARGEST_HALF = np.float32(65504.0)
_STEPS = np.float32(127.0)


class CpuCells:
    """Implements ``forward.cells.CellStore``.

    Args:
        cache: the KV cache.
        head_dim: elements of a key or value.
        frequencies: see ``shift_keys``.
    """

    def __init__(self, cache: KVCache, head_dim: int, frequencies: Float32Array) -> None:
        self._keys = cache.keys.reshape(-1, head_dim)
        self._values = cache.values.reshape(-1, head_dim)
        self._key_scales, self._value_scales = cache.key_scales, cache.value_scales
        self._frequencies = frequencies

    def read(self, cells: Int32Array) -> tuple[Float32Array, Float32Array]:
        """See ``CellStore.read``."""
        return (
            _decode(self._keys, self._key_scales, cells),
            _decode(self._values, self._value_scales, cells),
        )

    def write(self, cells: Int32Array, keys: Float32Array, values: Float32Array) -> None:
        """See ``CellStore.write``."""
        _encode(keys, self._keys, self._key_scales, cells)
        _encode(values, self._values, self._value_scales, cells)

    def copy(
        self, source: Int32Array, target: Int32Array, shift: Int32Array | None = None
    ) -> None:
        """See ``CellStore.copy``."""
        shifted = None if shift is None else shift_keys(
            _decode(self._keys, self._key_scales, source), shift, self._frequencies
        )
        for array in (self._keys, self._values, self._key_scales, self._value_scales):
            if len(array):
                array[target] = array[source]
        if shifted is not None:
            _encode(shifted, self._keys, self._key_scales, target)


def _decode(entries: KVArray, scales: Float32Array, cells: Int32Array) -> Float32Array:
    found = entries[cells]
    if found.dtype == np.uint16:
        return found.view(np.float16).astype(np.float32)
    numbers = found.astype(np.float32)
    return numbers * scales[cells][:, None] if len(scales) else numbers


def _encode(
    numbers: Float32Array, entries: KVArray, scales: Float32Array, cells: Int32Array
) -> None:
    """Round as ``kv_cache.write_entry`` does."""
    if entries.dtype == np.float32:
        entries[cells] = numbers
    elif entries.dtype == np.uint16:
        clipped = np.clip(numbers, -_LARGEST_HALF, _LARGEST_HALF)
        entries[cells] = clipped.astype(np.float16).view(np.uint16)
    else:
        span = np.abs(numbers).max(axis=1)
        scales[cells] = span / _STEPS
        with np.errstate(divide="ignore"):
            factor = np.where(span > 0, _STEPS / span, np.float32(0.0)).astype(np.float32)
        entries[cells] = np.rint(numbers * factor[:, None]).astype(np.int8)
