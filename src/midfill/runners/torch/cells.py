"""TorchCells: the torch runner's KV cache, cell by cell."""

import torch

from midfill.arrays import Float32Array, Int32Array
from midfill.runners.forward.cells import CellLayout, StoredCells, UInt8Array
from midfill.runners.rope import shift_keys
from midfill.runners.torch.part_attention import cell_places


class TorchCells:
    """Implements ``runners.forward.cells.CellStore``.

    Args:
        keys, values: [layers, slots, kv_heads, head_dim], on one device; one tensor where a value
            is the key itself, which is then stored once.
        frequencies: float32 [layers, head_dim / 2], radians per position.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, frequencies: Float32Array) -> None:
        self._keys, self._values, self._frequencies = keys, values, frequencies
        self._caches = (keys,) if values is keys else (keys, values)

    def read(self, cells: Int32Array) -> tuple[Float32Array, Float32Array]:
        """See ``CellStore.read``."""
        return self.read_keys(cells), self._read(self._values, cells)

    def read_keys(self, cells: Int32Array) -> Float32Array:
        """See ``CellStore.read_keys``."""
        return self._read(self._keys, cells)

    def write(self, cells: Int32Array, keys: Float32Array, values: Float32Array) -> None:
        """See ``CellStore.write``."""
        place = self._place(cells)
        for cache, numbers in zip(self._caches, (keys, values), strict=False):
            cache[place] = torch.from_numpy(numbers).to(cache.device, cache.dtype)

    def take(
        self,
        cells: Int32Array,
        shift: Int32Array | None = None,
        layers: Int32Array | None = None,
    ) -> StoredCells:
        """See ``CellStore.take``."""
        place = self._place(cells)
        keys, *rest = (cache[place] for cache in self._caches)
        if shift is not None:
            moved = shift_keys(keys.float().cpu().numpy(), shift, self._frequencies, layers)
            keys = torch.from_numpy(moved).to(keys.device, keys.dtype)
        return StoredCells((keys, *rest))

    def put(self, cells: Int32Array, stored: StoredCells) -> None:
        """See ``CellStore.put``."""
        place = self._place(cells)
        for cache, taken in zip(self._caches, stored.arrays, strict=True):
            cache[place] = taken

    @property
    def layout(self) -> CellLayout:
        """See ``CellStore.layout``."""
        width = self._keys.shape[-1] * self._keys.element_size()
        return CellLayout(
            str(self._keys.dtype).removeprefix("torch."), (width,) * len(self._caches)
        )

    def dump(self, cells: Int32Array) -> tuple[UInt8Array, ...]:
        """See ``CellStore.dump``."""
        place = self._place(cells)
        taken = (cache[place] for cache in self._caches)
        return tuple(each.contiguous().view(torch.uint8).cpu().numpy() for each in taken)

    def restore(self, cells: Int32Array, arrays: tuple[UInt8Array, ...]) -> None:
        """See ``CellStore.restore``."""
        place = self._place(cells)
        for cache, stored in zip(self._caches, arrays, strict=True):
            numbers = torch.from_numpy(stored.copy()).view(cache.dtype)
            cache[place] = numbers.to(cache.device)

    def _read(self, cache: torch.Tensor, cells: Int32Array) -> Float32Array:
        numbers: Float32Array = cache[self._place(cells)].float().cpu().numpy()
        return numbers

    def _place(self, cells: Int32Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return layers, slots and heads of cells."""
        numbers = torch.from_numpy(cells).to(self._keys.device, torch.int64)
        return cell_places(numbers, self._keys.shape)
