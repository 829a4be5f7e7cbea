"""CellStore: a runner's KV cache, cell by cell (``kv.ragged`` says what a cell is)."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from midfill.arrays import Float32Array, Int32Array

UInt8Array = NDArray[np.uint8]


@dataclass(frozen=True)
class CellLayout:
    """How a runner stores a cell.

    Attributes:
        dtype: of the numbers, such as "f16".
        widths: bytes of a cell in each array: keys, values unless they are the keys themselves,
            and scales if there are any.
    """

    dtype: str
    widths: tuple[int, ...]


@dataclass(frozen=True)
class StoredCells:
    """A copy of cells as their runner stores them; opaque to everyone else.

    Attributes:
        arrays: those of ``CellLayout.widths``; the first dimension is the cells'.
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

    def read_keys(self, cells: Int32Array) -> Float32Array:
        """Return what ``read`` returns of K alone."""

    def write(self, cells: Int32Array, keys: Float32Array, values: Float32Array) -> None:
        """Store K and V, rounded as a forward pass rounds them; K alone where V is K itself.

        Args:
            cells: [n] int32, each named once.
            keys, values: float32 [n, head_dim]; keys after the rotary embedding.
        """

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

    def put(self, cells: Int32Array, stored: StoredCells) -> None:
        """Store what ``take`` returned.

        Args:
            cells: [n] int32, each named once.
            stored: as many cells.
        """

    @property
    def layout(self) -> CellLayout:
        """How cells are stored."""

    def dump(self, cells: Int32Array) -> tuple[UInt8Array, ...]:
        """Return copies of [n] int32 cells as bytes: per array of the layout, [n, width]."""

    def restore(self, cells: Int32Array, arrays: tuple[UInt8Array, ...]) -> None:
        """Store what ``dump`` returned, also in another process.

        Args:
            cells: [n] int32, each named once.
            arrays: per array of the layout, [n, width].
        """
