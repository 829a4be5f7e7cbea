"""choose_tiles: the fastest tile heights for a model's matrices on this chip, measured once.

Measured with the model itself: its last two layers and its head run over the same rows, with every
height in turn. Kept beside the compiled kernels, so later starts only read it.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from numba.core.registry import cpu_target

from midfill.kernels.cpu.clock import DOWN, GATE_UP, HEAD, OUTPUT, QKV
from midfill.kernels.cpu.jit import compiled_folder
from midfill.kernels.cpu.linear import MAX_CODE_ROWS, MAX_TILE_ROWS
from midfill.kernels.cpu.packing import WeightFormat
from midfill.kernels.cpu.tiles import MATRICES, PLANNED_ROWS, cheapest_heights, even_heights
from midfill.runners.packed_model import PackedModel
from midfill.system.cache import store_file

Plan = npt.NDArray[np.uint8]

MEASURED_ROWS = 24
"""A multiple of every height that is tried."""
_HEIGHTS = (1, 2, 3, 4, 6, 8)
_REPEATS = 5
_PHASES = (QKV, OUTPUT, GATE_UP, DOWN, HEAD)  # of MATRICES


class _Kept(msgspec.Struct):
    plan: list[list[int]]


def even_plan(model: PackedModel) -> Plan:
    """What is used until something was measured: uint8 [matrices, PLANNED_ROWS + 1]."""
    return np.stack([even_heights(tallest) for tallest in _tallest(model)])


def choose_tiles(
    model: PackedModel, threads: int, measure: Callable[[Plan], npt.NDArray[np.int64]]
) -> Plan:
    """The plan measured for such a model on this chip, now or by an earlier process.

    Args:
        model: its weights.
        threads: that a step runs on.
        measure: runs ``MEASURED_ROWS`` rows with a plan; returns the ticks of every phase, 0 where
            the chip's counter can't be read.

    Returns:
        uint8 [matrices, PLANNED_ROWS + 1], see ``kernels.cpu.tiles``.
    """
    path = compiled_folder() / f"tiles-{_key(model, threads)}.json"
    plan = _read(path, model)
    if plan is None:
        plan = _measured(model, measure)
        kept = msgspec.json.encode(_Kept(plan.tolist()))
        store_file(path, lambda partial: _write(partial, kept))
    return plan


def _measured(model: PackedModel, measure: Callable[[Plan], npt.NDArray[np.int64]]) -> Plan:
    plan = even_plan(model)
    tallest = _tallest(model)
    costs = np.full((len(MATRICES), MAX_TILE_ROWS), np.inf)
    for height in _HEIGHTS:
        if height > max(tallest):
            continue
        tried = np.minimum(plan, height)
        ticks = np.min([measure(tried) for _ in range(_REPEATS)], axis=0)[list(_PHASES)]
        if not ticks.all():
            return plan
        for matrix in range(len(MATRICES)):
            if height <= tallest[matrix]:
                costs[matrix, height - 1] = ticks[matrix] / (MEASURED_ROWS // height)
    return np.stack([cheapest_heights(row.tolist()) for row in costs])


def _tallest(model: PackedModel) -> list[int]:
    """The most rows that a tile of each matrix can hold."""
    formats = model.formats
    dense = [
        {formats.qkv}, {formats.o}, {formats.gate, formats.up}, {formats.down}, {formats.head},
    ]  # fmt: skip
    return [MAX_TILE_ROWS if each == {WeightFormat.F32} else MAX_CODE_ROWS for each in dense]


def _key(model: PackedModel, threads: int) -> str:
    chip = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((chip, threads, model.shape, model.formats)).encode()).hexdigest()


def _read(path: Path, model: PackedModel) -> Plan | None:
    """A plan that was kept; None if there is none, or none that could be used."""
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=_Kept).plan
    except (OSError, msgspec.MsgspecError):
        return None
    tallest = _tallest(model)
    if [len(row) for row in rows] != [PLANNED_ROWS + 1] * len(MATRICES):
        return None
    if any(
        not 1 <= height <= min(left, most)
        for row, most in zip(rows, tallest, strict=True)
        for left, height in enumerate(row[1:], 1)
    ):
        return None
    return np.array(rows, np.uint8)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
