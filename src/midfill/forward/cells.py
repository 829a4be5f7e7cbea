"""CellStore: a runner's KV cache, cell by cell (``kv.ragged`` says what a cell is)."""

from dataclasses import dataclass
from typing import Any, Protocol

from midfill.arrays import Float32Array, Int32Array


@dataclass(frozen=True)
class StoredCells:
    """A copy of cells as their runner stores them; opaque to everyone else.

    Attributes:
        arrays: keys, values, and scales if there are any; the first dimension is the cells'.
    """

    arrays: tuple[Any, ...]


class CellStore(Protocol):
    """Reads, writes and moves single cells. Calls go between steps, never within one."""

    def read(self, cells: Int32Array) -> tuple[Float32Array, Float32Array]:
        """Return K, as it is stored after the rotary embedding, and V of some cells.

        Args:
            cells: [n] int32.

        Returns:
            keys, values: float32 [n, head_dim], what the stored numbers stand for.
        """
        ...

    def read_keys(self, cells: Int32Array) -> Float32Array:
        """Return what ``read`` returns of K alone."""
        ...

    def write(self, cells: Int32Array, keys: Float32Array, values: Float32Array) -> None:
        """Store K and V, rounded as a forward pass rounds them.

        Args:
            cells: [n] int32, each named once.
            keys, values: float32 [n, head_dim]; keys after the rotary embedding.
        """
        ...

    def take(
        self,
        cells: Int32Array,
        shift: Int32Array | None = None,
        layers: Int32Array | None = None,
    ) -> StoredCells:
        """Return a copy of cells, bit for bit where they aren't shifted.

        Args:
            cells: [n] int32.
            shift: [n] int32, by how many positions each key moves: it is rotated on by as much,
                and rounded anew. None moves none.
            layers: [n] int32, whose keys they are, where layers rotate differently
                (``ModelConfig.local_rope_theta``). None rotates as the first layer does.
        """
        ...

    def put(self, cells: Int32Array, stored: StoredCells) -> None:
        """Store what ``take`` returned.

        Args:
            cells: [n] int32, each named once.
            stored: as many cells.
        """
        ...
