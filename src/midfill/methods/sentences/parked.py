"""ParkedKeys: a sequence's KV beside the KV pool, and copies in the pool of what is read now."""

import numpy as np

from midfill.arrays import BoolArray, Int32Array
from midfill.kv.ragged import cells_of_slots
from midfill.runners.forward.cells import CellStore

_NONE = -1


class ParkedKeys:
    """Keys and values of one sequence, as bytes in memory of their own.

    Keys are numbered in each head (layer and KV head) from 0 on. All heads hold equally many, and
    have equally many places in the pool: the cells of some slots.

    Args:
        store: the pool's cells.
        slots: of the whole pool.
        heads: layers * kv_heads.
        most: how many keys a head may come to hold. Memory is backed as it fills.

    Attributes:
        count: how many keys each head holds.
    """

    def __init__(self, store: CellStore, slots: int, heads: int, most: int) -> None:
        self._store, self._slots = store, slots
        self._arrays = [np.empty((heads, most, width), np.uint8) for width in store.layout.widths]
        self._cells: Int32Array = np.zeros((heads, 0), np.int32)
        self._held: Int32Array = np.zeros((heads, 0), np.int32)
        self._places: Int32Array = np.zeros((heads, 0), np.int32)
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values."""
        return sum(array[:, : self.count].nbytes for array in self._arrays)

    def add(self, cells: Int32Array) -> None:
        """Copy further keys out of the pool: those of [heads, n] cells."""
        heads, count = cells.shape
        end = self.count + count
        dumped = self._store.dump(cells.reshape(-1))
        for array, added in zip(self._arrays, dumped, strict=True):
            array[:, self.count : end] = added.reshape(heads, count, -1)
        nowhere = np.full((heads, count), _NONE, np.int32)
        self._places = np.concatenate((self._places, nowhere), axis=1)
        self.count = end

    def use_slots(self, slots: Int32Array) -> None:
        """Have copies lie in these slots, which begin with those that they lie in so far."""
        heads, before = self._held.shape
        added = np.full((heads, len(slots) - before), _NONE, np.int32)
        self._held = np.concatenate((self._held, added), axis=1)
        self._cells = cells_of_slots(slots, heads, self._slots)

    def fetch(self, wanted: BoolArray) -> int:
        """Copy into the pool what is wanted and isn't there, in the place of what isn't wanted.

        Args:
            wanted: [heads, count] bool, for each head at most as many as there are slots.

        Returns:
            How many cells were copied.

        Raises:
            ValueError: more are wanted.
        """
        if (np.count_nonzero(wanted, axis=1) > self._held.shape[1]).any():
            raise ValueError(f"more keys are wanted than {self._held.shape[1]} slots hold")
        head, number = np.nonzero(wanted & (self._places == _NONE))
        if not len(head):
            return 0
        is_held = self._held != _NONE
        is_free = ~is_held | ~np.take_along_axis(wanted, np.maximum(self._held, 0), axis=1)
        free = np.argsort(~is_free, axis=1, kind="stable")
        starts = np.searchsorted(head, np.arange(len(wanted)))
        place = free[head, np.arange(len(head)) - starts[head]]
        left = self._held[head, place]
        self._places[head[left != _NONE], left[left != _NONE]] = _NONE
        self._held[head, place] = number
        self._places[head, number] = place
        arrays = tuple(array[head, number] for array in self._arrays)
        self._store.restore(self._cells[head, place], arrays)
        return len(head)

    def cells(self, head: Int32Array, number: Int32Array) -> Int32Array:
        """Return the cells [n] in the pool of keys that were fetched, by head and number."""
        place = self._places[head, number]
        if (place == _NONE).any():
            raise ValueError("a key is not in the pool")
        found: Int32Array = self._cells[head, place]
        return found
