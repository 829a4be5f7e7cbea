"""EpisodeStore: compressed caches of conversations in host memory, between their questions."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from midfill.arrays import Int32Array
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.pool import KVPool
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.kv.sequence_kv import SequenceKV
from midfill.runners.forward.cells import CellStore


class Stored(Protocol):
    """What a store can hold."""

    @property
    def nbytes(self) -> int:
        """Its memory."""


_Kept = TypeVar("_Kept", bound=Stored)


@dataclass(frozen=True, eq=False)
class EpisodeCache:
    """What is left of a history's KV, as bytes.

    Attributes:
        tokens: of the history.
        slots: how many slots it fills.
        indptr: [layers * kv_heads + 1] int32, from where to where each head has its keys.
        numbers: [n] int32, which token each is of.
        arrays: per array of the pool's layout, [n, width] uint8.
    """

    tokens: int
    slots: int
    indptr: Int32Array
    numbers: Int32Array
    arrays: tuple[NDArray[np.uint8], ...]

    @classmethod
    def save(cls, kv: SequenceKV, cells: CellStore) -> "EpisodeCache":
        """Return what a sequence holds of its first tokens, which are compressed."""
        prefix = kv.prefix
        assert prefix is not None
        arrays = cells.dump(prefix.index.cells)
        return cls(prefix.tokens, len(prefix.slots), prefix.index.indptr, prefix.numbers, arrays)

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        lists = self.indptr.nbytes + self.numbers.nbytes
        return lists + sum(array.nbytes for array in self.arrays)

    def load(self, kv: SequenceKV, cells: CellStore, pool: KVPool) -> None:
        """Put it in the place of a sequence's first tokens.

        Args:
            kv: owns at least ``slots`` slots; all others are released.
            cells: the pool's.
            pool: where the slots come from.
        """
        slots = kv.exchange(self.slots)
        heads = len(self.indptr) - 1
        free = cells_of_slots(slots, heads, pool.slots.total).reshape(-1)
        index = RaggedIndex(free[: len(self.numbers)], self.indptr)
        kv.prefix = CompressedPrefix(self.tokens, index, slots, pool.slots, numbers=self.numbers)
        cells.restore(index.cells, self.arrays)


class EpisodeStore:
    """Caches and clusterings of all tenants; what was used least recently is forgotten.

    Keys begin with a tenant and the history, so nothing is found under another's.

    Args:
        limit: of its memory, in bytes.

    Attributes:
        nbytes: memory of all that it holds.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, Stored] = OrderedDict()
        self.nbytes = 0

    def find(self, key: Hashable, kind: type[_Kept]) -> _Kept | None:
        """Return what is held under a key; None if it isn't there."""
        found = self._held.get(key)
        if not isinstance(found, kind):
            return None
        self._held.move_to_end(key)
        return found

    def keep(self, key: Hashable, stored: Stored) -> None:
        """Hold something, and forget others where all of it takes more than the limit.

        What is larger than that by itself is not held.
        """
        before = self._held.pop(key, None)
        self.nbytes -= 0 if before is None else before.nbytes
        if stored.nbytes > self._limit:
            return
        self._held[key] = stored
        self.nbytes += stored.nbytes
        while self.nbytes > self._limit:
            _, forgotten = self._held.popitem(last=False)
            self.nbytes -= forgotten.nbytes
