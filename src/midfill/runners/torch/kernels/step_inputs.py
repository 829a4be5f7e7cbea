"""StepInputs: what the kernels need of a batch, on the GPU, at addresses that stay the same.

A captured graph reads the same memory each time, so a batch is copied there, in one go, and padded
to the rows that the graph was captured with.
"""

from dataclasses import dataclass

import numpy as np
import torch

from midfill.arrays import Int32Array
from midfill.runners.forward.batch import ForwardBatch


@dataclass(frozen=True)
class StepInputs:
    """The rows of a step. Rows of one request that follow one another share tiles.

    Attributes:
        tile: how many rows a tile has at most.
        token_ids, positions: [rows] int32; 0 of rows that are padding.
        write_slots: [rows] int32; -1 of padding.
        seen: [rows] int32, how many of its request's slots each row sees; 0 of padding.
        tile_rows, tile_sizes: [rows] int32, each tile's first row and how many it has; size 0 of
            those that are padding.
        tile_slots: [rows] int32, where in ``kv_slots`` each tile's slots begin.
        logit_rows: [rows] int32, rows whose logits are wanted; padded with row 0.
        kv_slots: int32, the slots of all requests.
    """

    tile: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    seen: torch.Tensor
    tile_rows: torch.Tensor
    tile_sizes: torch.Tensor
    tile_slots: torch.Tensor
    logit_rows: torch.Tensor
    kv_slots: torch.Tensor


_COLUMNS = 8  # of StepInputs that have an entry per row
_WRITE_SLOTS = 2


class InputBuffers:
    """The memory of StepInputs, and the machine's that is copied to it.

    Args:
        rows: of a batch, at most.
        kv_slots: of all its requests together, at most.
        device: where the kernels run.
    """

    def __init__(self, rows: int, kv_slots: int, device: torch.device) -> None:
        self.rows = rows
        self.kv_slots = kv_slots
        size = _COLUMNS * rows + kv_slots
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array: Int32Array = self._host.numpy()
        # Until a batch comes, all rows are padding.
        self._device[_WRITE_SLOTS * rows : (_WRITE_SLOTS + 1) * rows] = -1
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def inputs(self, rows: int, tile: int) -> StepInputs:
        """Return the memory of so many rows."""
        columns = self._device[: _COLUMNS * self.rows].view(_COLUMNS, self.rows)[:, :rows]
        return StepInputs(
            tile=tile, token_ids=columns[0], positions=columns[1], write_slots=columns[2],
            seen=columns[3], tile_rows=columns[4], tile_sizes=columns[5], tile_slots=columns[6],
            logit_rows=columns[7], kv_slots=self._device[_COLUMNS * self.rows :],
        )  # fmt: skip

    def load(self, batch: ForwardBatch, rows: int, tile: int) -> None:
        """Copy a batch to the device, padded.

        Args:
            batch: no more rows and slots than there is room for.
            rows: that it is padded to.
            tile: see ``StepInputs``.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last batch has left the machine's memory
        columns = self._array[: _COLUMNS * self.rows].reshape(_COLUMNS, self.rows)[:, :rows]
        given = (
            batch.token_ids, batch.positions, batch.write_slots, batch.slots_seen(),
            *tiles_of(batch, tile), batch.logit_rows,
        )  # fmt: skip
        for number, (column, array) in enumerate(zip(columns, given, strict=True)):
            column[: len(array)] = array
            column[len(array) :] = -1 if number == _WRITE_SLOTS else 0
        end = _COLUMNS * self.rows + len(batch.kv_slots)
        self._array[_COLUMNS * self.rows : end] = batch.kv_slots
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def tiles_of(batch: ForwardBatch, tile: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Divide each request's rows into tiles.

    Args:
        batch: the rows.
        tile: how many a tile has at most.

    Returns:
        Of each tile its first row, how many it has, and where its request's slots begin: [tiles]
        int32.
    """
    rows = np.diff(batch.query_indptr)
    tiles = -(-rows // tile)
    request = np.repeat(np.arange(len(rows)), tiles)
    number = np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = (batch.query_indptr[request] + number * tile).astype(np.int32)
    sizes = np.minimum(batch.query_indptr[request + 1] - first, tile).astype(np.int32)
    return first, sizes, batch.kv_indptr[request].astype(np.int32)
