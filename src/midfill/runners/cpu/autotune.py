"""Autotuning: the fastest tile rows for a model's matrices on this chip, measured once.

Measured with the model itself: its last two layers and its head run over the same rows, with
tiles of each height in turn. Then the whole model runs over one row with each way to prefetch
weights in turn: where a step reads all of them, they come from memory, as in serving. The result
is kept beside the compiled kernels, so later starts only read it. If other processes kept the
threads from their cores meanwhile, the next few starts measure again, until once they didn't.

Where AMX may be used, tiles of 16 and 48 rows run on it. They are measured like any others, matrix
by matrix, so AMX multiplies only what it multiplies faster.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numba.core.registry import cpu_target

from midfill.kernels.cpu.amx_products import AMX_ROWS
from midfill.kernels.cpu.clock import DOWN, GATE_UP, HEAD, OUTPUT, QKV
from midfill.kernels.cpu.jit import compiled_folder
from midfill.kernels.cpu.linear import MAX_TILE_ROWS
from midfill.kernels.cpu.memory import Float64Array, Int64Array, Uint8Array
from midfill.kernels.cpu.panel_products import MAX_AMX_ROWS, MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.tiles import (
    DEFAULT_PREFETCH,
    MATRICES,
    MAX_TABLE_ROWS,
    PREFETCH,
    Prefetch,
    cheapest_tile_rows,
    even_tile_rows,
)
from midfill.kernels.cpu.weight_formats import WeightFormat
from midfill.runners.cpu.amx import AmxUse
from midfill.runners.cpu.packed_model import PackedModel
from midfill.system.cache import store_file

TileTable = Uint8Array
"""uint8 [matrices, MAX_TABLE_ROWS + 1]: the tile rows of each of ``tiles.MATRICES``."""

MEASURED_ROWS = 24
"""A multiple of every height that is tried without AMX."""
AMX_MEASURED_ROWS = MAX_AMX_ROWS
"""A multiple of every height that is tried with AMX."""
_HEIGHTS = (1, 2, 3, 4, 6, 8)
_AMX_HEIGHTS = (AMX_ROWS, MAX_AMX_ROWS)
_VERSION = 4  # of what is measured and kept
_MIN_TURNS = 5
_MAX_TURNS = 30
_SECONDS = 0.5  # after which there are no more turns than the least
_MIN_GAIN = 1.03
"""How many times as fast others than the tallest tiles must be: measurements differ, too."""
_MOST_WAITING = 0.1
"""Share of a measurement in which threads may wait for cores; otherwise it is repeated."""
_MOST_STARTS = 4
"""That measure, on a machine that is always busy."""
_PHASES = (QKV, OUTPUT, GATE_UP, DOWN, HEAD)
"""In which each of ``tiles.MATRICES`` is computed."""


class _Kept(msgspec.Struct):
    """A file.

    Attributes:
        tile_rows: the table.
        waiting: share of the measurement in which threads waited for cores.
        starts: how many have measured.
    """

    tile_rows: list[list[int]]
    waiting: float
    starts: int

    @property
    def is_final(self) -> bool:
        return self.waiting <= _MOST_WAITING or self.starts >= _MOST_STARTS


def default_tile_rows(model: PackedModel) -> TileTable:
    """Return the tile rows used until some were measured."""
    return np.stack([even_tile_rows(tallest) for tallest in _tallest(model)])


def amx_tile_rows(model: PackedModel, heights: Sequence[int] = _AMX_HEIGHTS) -> TileTable:
    """Return tiles of these heights on AMX wherever they fit, and the default ones elsewhere."""
    table = default_tile_rows(model)
    for matrix, formats in enumerate(_formats(model)):
        if WeightFormat.F32 not in formats:
            for height in sorted(heights):
                table[matrix, height:] = height
    return table


def autotune_tile_rows(
    model: PackedModel,
    threads: int,
    measure: Callable[[TileTable, int], Int64Array],
    amx: AmxUse = AmxUse.OFF,
    waited: Callable[[], float | None] = lambda: None,
) -> TileTable:
    """Return the tile rows measured for such a model on this chip, now or by an earlier process.

    Args:
        model: its weights.
        threads: that a step runs on.
        measure: runs so many rows with some tile rows and returns the ticks of each phase; 0 where
            the chip's counter can't be read. One row runs through the whole model;
            ``AMX_MEASURED_ROWS`` with AMX, else ``MEASURED_ROWS``, through some layers.
        amx: whether tiles on AMX are measured; where it is on, nothing is.
        waited: returns the seconds that the threads have waited for cores so far, all together;
            None where the system doesn't say.
    """
    if amx is AmxUse.ON:
        return amx_tile_rows(model)
    with_amx = amx is AmxUse.AUTO
    path = compiled_folder() / f"tiles-{_key(model, threads, with_amx)}.json"
    kept = _read(path, model, with_amx)
    if kept is None or not kept.is_final:
        before, started = waited(), time.monotonic()
        table = _measure_all(model, measure, with_amx)
        _measure_prefetches(table, measure)
        waiting = _share(before, waited(), threads * (time.monotonic() - started))
        again = kept is not None
        starts = 1 if kept is None else kept.starts + 1
        if kept is None or waiting < kept.waiting:
            kept = _Kept(table.tolist(), waiting, starts)
        kept.starts = starts
        data = msgspec.json.encode(kept)
        store_file(path, lambda partial: partial.write_bytes(data), quiet=again)
    return np.array(kept.tile_rows, np.uint8)


def _share(before: float | None, after: float | None, seconds: float) -> float:
    """Return which share of a time threads have waited; 0 where nothing is known."""
    return 0.0 if before is None or after is None else (after - before) / max(seconds, 1e-9)


def _measure_all(
    model: PackedModel, measure: Callable[[TileTable, int], Int64Array], with_amx: bool
) -> TileTable:
    default = default_tile_rows(model)
    heights = _possible_heights(model, with_amx)
    # As many rows for all: weights come from memory once, however many there are.
    rows = AMX_MEASURED_ROWS if with_amx else MEASURED_ROWS
    tables = {
        height: amx_tile_rows(model, [height])
        if height in _AMX_HEIGHTS
        else np.minimum(default, height)
        for height in sorted(set().union(*heights))
    }
    ticks = _relative_ticks(tables, lambda table: measure(table, rows))
    costs = np.full((len(MATRICES), MAX_TABLE_ROWS), np.inf)
    for matrix, (possible, tallest) in enumerate(zip(heights, _tallest(model), strict=True)):
        for height in possible:
            handicap = 1.0 if height == tallest else _MIN_GAIN
            costs[matrix, height - 1] = handicap * ticks[height][matrix] / (rows // height)
    if not costs.all():
        return default
    return np.stack([cheapest_tile_rows(row.tolist()) for row in costs])


def _measure_prefetches(table: TileTable, measure: Callable[[TileTable, int], Int64Array]) -> None:
    """Choose how each matrix prefetches weights; the table's entries are replaced."""
    tables: dict[int, TileTable] = {}
    for prefetch in Prefetch:
        tables[prefetch] = table.copy()
        tables[prefetch][:, PREFETCH] = prefetch
    ticks = _relative_ticks(tables, lambda each: measure(each, 1))
    for matrix in range(len(MATRICES)):
        costs = {each: float(ticks[each][matrix]) for each in Prefetch}
        costs[DEFAULT_PREFETCH] /= _MIN_GAIN
        table[matrix, PREFETCH] = min(costs, key=costs.__getitem__)


def _relative_ticks(
    tables: dict[int, TileTable], measure: Callable[[TileTable], Int64Array]
) -> dict[int, Float64Array]:
    """Return how long each of ``_PHASES`` takes with each table, as a share of what all take.

    The tables are tried in turn, and a turn's shares are one observation, of which the median
    counts: so neither slow nor fast moments of the machine favour a table.
    """
    turns = []
    end = time.monotonic() + _SECONDS
    for turn in range(_MAX_TURNS):
        if turn >= _MIN_TURNS and time.monotonic() > end:
            break
        turns.append([measure(table)[list(_PHASES)] for table in tables.values()])
    ticks = np.array(turns, np.float64)
    shares = ticks / np.maximum(ticks.sum(axis=1, keepdims=True), 1.0)
    return dict(zip(tables, np.median(shares, axis=0), strict=True))


def _formats(model: PackedModel) -> list[set[WeightFormat]]:
    """Return the formats of each of ``tiles.MATRICES``."""
    formats = {name: matrix.formats for name, matrix in model.matrices.items()}
    return [
        set().union(*(formats.get(name, set()) for name in names))
        for names in (
            ("qkv", "query", "query_gate", "ssm_in"), ("o", "ssm_out"),
            ("gate", "up", "experts_in", "shared_gate", "shared_up"),
            ("down", "experts_out", "shared_down"), ("head",),
        )
    ]  # fmt: skip


def _tallest(model: PackedModel) -> list[int]:
    """Return the maximum rows of a tile of each of ``tiles.MATRICES``, but for those on AMX."""
    return [
        MAX_TILE_ROWS if each == {WeightFormat.F32} else MAX_QUANTIZED_ROWS
        for each in _formats(model)
    ]


def _possible_heights(model: PackedModel, with_amx: bool) -> list[set[int]]:
    """Return the heights that are tried for each of ``tiles.MATRICES``."""
    return [
        {height for height in _HEIGHTS if height <= tallest}
        | (set(_AMX_HEIGHTS) if with_amx and WeightFormat.F32 not in formats else set())
        for tallest, formats in zip(_tallest(model), _formats(model), strict=True)
    ]


def _key(model: PackedModel, threads: int, with_amx: bool) -> str:
    chip = cpu_target.target_context.codegen().magic_tuple()
    digest = hashlib.sha256(repr((_VERSION, chip, threads, with_amx, model.config)).encode())
    for name, matrix in model.matrices.items():
        digest.update(repr((name, matrix.outputs, matrix.inputs)).encode())
        digest.update(matrix.panels[:, 1].tobytes())
    return digest.hexdigest()


def _read(path: Path, model: PackedModel, with_amx: bool) -> _Kept | None:
    """Return what a file holds; None if it is missing or makes no sense."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None
    rows = kept.tile_rows
    if [len(row) for row in rows] != [MAX_TABLE_ROWS + 1] * len(MATRICES):
        return None
    if any(row[PREFETCH] not in [*Prefetch] for row in rows):
        return None
    heights, default = _possible_heights(model, with_amx), default_tile_rows(model)
    if any(
        height > left or height not in possible | {int(usual)}
        for row, possible, even in zip(rows, heights, default, strict=True)
        for left, (height, usual) in enumerate(zip(row[1:], even[1:], strict=True), 1)
    ):
        return None
    return kept
