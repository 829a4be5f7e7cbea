"""CellStore: a runner's KV cache, cell by cell (``forward.ragged`` says what a cell is)."""

from typing import Protocol

from midfill.arrays import Float32Array, Int32Array


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

    def write(self, cells: Int32Array, keys: Float32Array, values: Float32Array) -> None:
        """Store K and V, rounded as a forward pass rounds them.

        Args:
            cells: [n] int32, each named once.
            keys, values: float32 [n, head_dim]; keys after the rotary embedding.
        """
        ...

    def copy(
        self, source: Int32Array, target: Int32Array, shift: Int32Array | None = None
    ) -> None:
        """Copy cells, bit for bit where they aren't shifted. Source and target may overlap.

        Args:
            source: [n] int32, cells to read.
            target: [n] int32, cells to write, each named once.
            shift: [n] int32, by how many positions each key moves: it is rotated on by as much,
                and rounded anew. None moves none.
        """
        ...
