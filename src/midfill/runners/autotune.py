"""Autotuning: the fastest tile rows for a model's matrices on this chip, measured once.

Measured with the model itself: its last two layers and its head run over the same rows, with
tiles of each height in turn. The result is kept beside the compiled kernels, so later starts only
read it.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numba.core.registry import cpu_target

from midfill.kernels.cpu.clock import DOWN, GATE_UP, HEAD, OUTPUT, QKV
from midfill.kernels.cpu.jit import compiled_folder
from midfill.kernels.cpu.linear import MAX_TILE_ROWS
from midfill.kernels.cpu.memory import Int64Array, Uint8Array
from midfill.kernels.cpu.panel_products import MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.tiles import MATRICES, MAX_TABLE_ROWS, cheapest_tile_rows, even_tile_rows
from midfill.kernels.cpu.weight_formats import WeightFormat
from midfill.runners.packed_model import PackedModel
from midfill.system.cache import store_file

TileTable = Uint8Array
"""uint8 [matrices, MAX_TABLE_ROWS + 1]: the tile rows of each of ``tiles.MATRICES``."""

MEASURED_ROWS = 24
"""A multiple of every height that is tried."""
_HEIGHTS = (1, 2, 3, 4, 6, 8)
_REPEATS = 5
_PHASES = (QKV, OUTPUT, GATE_UP, DOWN, HEAD)
"""In which each of ``tiles.MATRICES`` is computed."""


class _Kept(msgspec.Struct):
    tile_rows: list[list[int]]


def default_tile_rows(model: PackedModel) -> TileTable:
    """Return the tile rows used until some were measured."""
    return np.stack([even_tile_rows(tallest) for tallest in _tallest(model)])


def autotune_tile_rows(
    model: PackedModel, threads: int, measure: Callable[[TileTable], Int64Array]
) -> TileTable:
    """Return the tile rows measured for such a model on this chip, now or by an earlier process.

    Args:
        model: its weights.
        threads: that a step runs on.
        measure: runs ``MEASURED_ROWS`` rows with some tile rows and returns the ticks of each
            phase; 0 where the chip's counter can't be read.
    """
    path = compiled_folder() / f"tiles-{_key(model, threads)}.json"
    table = _read(path, model)
    if table is None:
        table = _measure_all(model, measure)
        kept = msgspec.json.encode(_Kept(table.tolist()))
        store_file(path, lambda partial: _write(partial, kept))
    return table


def _measure_all(model: PackedModel, measure: Callable[[TileTable], Int64Array]) -> TileTable:
    default = default_tile_rows(model)
    tallest = _tallest(model)
    costs = np.full((len(MATRICES), MAX_TILE_ROWS), np.inf)
    for height in _HEIGHTS:
        if height > max(tallest):
            continue
        tried = np.minimum(default, height)
        ticks = np.min([measure(tried) for _ in range(_REPEATS)], axis=0)[list(_PHASES)]
        if not ticks.all():
            return default
        for matrix in range(len(MATRICES)):
            if height <= tallest[matrix]:
                costs[matrix, height - 1] = ticks[matrix] / (MEASURED_ROWS // height)
    return np.stack([cheapest_tile_rows(row.tolist()) for row in costs])


def _tallest(model: PackedModel) -> list[int]:
    """Return the maximum rows of a tile of each of ``tiles.MATRICES``."""
    weights = model.weights
    formats = [
        weights.qkv.formats, weights.o.formats,
        weights.gate_up.gate.formats | weights.gate_up.up.formats, weights.down.formats,
        weights.head.formats,
    ]  # fmt: skip
    return [MAX_TILE_ROWS if each == {WeightFormat.F32} else MAX_QUANTIZED_ROWS for each in formats]


def _key(model: PackedModel, threads: int) -> str:
    chip = cpu_target.target_context.codegen().magic_tuple()
    digest = hashlib.sha256(repr((chip, threads, model.config)).encode())
    for name, matrix in model.matrices.items():
        digest.update(repr((name, matrix.outputs, matrix.inputs)).encode())
        digest.update(matrix.panels[:, 1].tobytes())
    return digest.hexdigest()


def _read(path: Path, model: PackedModel) -> TileTable | None:
    """Return the tile rows in a file; None if it is missing or makes no sense."""
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=_Kept).tile_rows
    except (OSError, msgspec.MsgspecError):
        return None
    if [len(row) for row in rows] != [MAX_TABLE_ROWS + 1] * len(MATRICES):
        return None
    if any(
        not 1 <= height <= min(left, tallest)
        for row, tallest in zip(rows, _tallest(model), strict=True)
        for left, height in enumerate(row[1:], 1)
    ):
        return None
    return np.array(rows, np.uint8)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
