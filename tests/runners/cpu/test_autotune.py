"""Tile rows are measured once, kept, and read again; a file that makes no sense is replaced."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from midfill.kernels.cpu.clock import HEAD, PHASES, QKV
from midfill.kernels.cpu.jit import compiled_folder
from midfill.kernels.cpu.linear import MAX_TILE_ROWS
from midfill.kernels.cpu.tiles import HEAD_TILES, PREFETCH, QKV_TILES, Prefetch
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.amx import AmxUse
from midfill.runners.cpu.autotune import (
    AMX_MEASURED_ROWS,
    MEASURED_ROWS,
    amx_tile_rows,
    autotune_tile_rows,
    default_tile_rows,
)
from midfill.runners.cpu.packed_model import PackedModel, load_packed


class Chip:
    """A chip on which tiles of two rows are fastest for qkv, and tall tiles for the rest.

    One row is fastest with prefetches into the second-level cache for qkv, and without any for the
    rest. With AMX, tiles of 48 rows on it are slow for qkv, and fast for the rest.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.tallest = 0

    def __call__(self, tile_rows: npt.NDArray[np.uint8], rows: int) -> npt.NDArray[np.int64]:
        self.runs += 1
        ticks = np.full(len(PHASES), 1000, np.int64)
        if rows == 1:
            ticks[QKV] = 900 if tile_rows[QKV_TILES, PREFETCH] == Prefetch.L2 else 1000
            ticks[HEAD] = 900 if tile_rows[HEAD_TILES, PREFETCH] == Prefetch.NONE else 1000
            return ticks
        tallest = int(tile_rows[QKV_TILES].max())
        self.tallest = max(self.tallest, tallest)
        ticks[QKV] = 100 if tallest == 2 else 200 + tallest
        ticks[HEAD] = 1000 - int(tile_rows[HEAD_TILES].max())
        return ticks * rows // MEASURED_ROWS


class UnsteadyChip(Chip):
    """A chip that takes longer, or less long, for a stretch of the runs; all tiles are alike."""

    def __init__(self, stretch: range, ticks: int) -> None:
        super().__init__()
        self.stretch, self.ticks = stretch, ticks

    def __call__(self, tile_rows: npt.NDArray[np.uint8], rows: int) -> npt.NDArray[np.int64]:
        self.runs += 1
        return np.full(
            len(PHASES), self.ticks if self.runs in self.stretch else 1000 + self.runs % 7
        )


@pytest.fixture
def model(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PackedModel]:
    """A model, with a cache of its own in which nothing was measured."""
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path))
    compiled_folder.cache_clear()
    yield load_packed(open_checkpoint(tiny_folder), "q4")
    compiled_folder.cache_clear()


def test_the_fastest_tile_rows_are_used_and_kept(model: PackedModel) -> None:
    chip = Chip()
    tuned = autotune_tile_rows(model, 2, chip)
    assert tuned[QKV_TILES, 2:].max() == 2
    assert tuned[HEAD_TILES].max() == default_tile_rows(model)[HEAD_TILES].max()
    assert tuned[QKV_TILES, PREFETCH] == Prefetch.L2
    assert tuned[HEAD_TILES, PREFETCH] == Prefetch.NONE
    runs = chip.runs
    np.testing.assert_array_equal(autotune_tile_rows(model, 2, chip), tuned)
    assert chip.runs == runs
    autotune_tile_rows(model, 1, chip)
    assert chip.runs > runs


@pytest.mark.parametrize("first", [1, 4, 9, 14])
@pytest.mark.parametrize("ticks", [250, 4000])
def test_slow_and_fast_moments_of_the_machine_change_nothing(
    model: PackedModel, first: int, ticks: int
) -> None:
    tuned = autotune_tile_rows(model, 2, UnsteadyChip(range(first, first + 3), ticks))
    tallest = default_tile_rows(model).max(axis=1)
    np.testing.assert_array_equal(tuned.max(axis=1), tallest)


class Waiting:
    """Threads that wait for cores during some measurements, of which each asks twice."""

    def __init__(self, during: range) -> None:
        self.during = during
        self.asked = 0
        self.seconds = 0.0

    def __call__(self) -> float:
        measurement, is_end = divmod(self.asked, 2)
        self.asked += 1
        self.seconds += 1000.0 / (measurement + 1) * (is_end and measurement in self.during)
        return self.seconds


def test_what_was_measured_beside_busy_processes_is_measured_again(model: PackedModel) -> None:
    chip, waiting = Chip(), Waiting(range(2))
    runs = []
    for _ in range(5):
        autotune_tile_rows(model, 2, chip, waited=waiting)
        runs.append(chip.runs)
    first, second, third, fourth, fifth = runs
    assert 0 < first < second < third == fourth == fifth, "the third measurement was undisturbed"


def test_on_a_machine_that_is_always_busy_only_some_starts_measure(model: PackedModel) -> None:
    waiting = Waiting(range(100))
    chip = Chip()
    tuned = [autotune_tile_rows(model, 2, chip, waited=waiting) for _ in range(8)]
    assert waiting.asked == 2 * 4
    # What was disturbed least is kept: the last here.
    np.testing.assert_array_equal(tuned[-1], tuned[3])


def test_a_measurement_that_was_disturbed_more_is_not_kept(model: PackedModel) -> None:
    calm = autotune_tile_rows(model, 2, Chip(), waited=iter([0.0, 5.0]).__next__)
    again = autotune_tile_rows(
        model, 2, UnsteadyChip(range(0), 0), waited=iter([0.0, 5000.0]).__next__
    )
    np.testing.assert_array_equal(again, calm)


def test_tiles_on_amx_are_measured_too_where_it_may_be_used(model: PackedModel) -> None:
    chip = Chip()
    tuned = autotune_tile_rows(model, 2, chip, AmxUse.AUTO)
    assert chip.tallest == AMX_MEASURED_ROWS
    assert tuned[QKV_TILES].max() == 2
    assert tuned[HEAD_TILES, AMX_MEASURED_ROWS] == AMX_MEASURED_ROWS
    runs = chip.runs
    np.testing.assert_array_equal(autotune_tile_rows(model, 2, chip, AmxUse.AUTO), tuned)
    assert chip.runs == runs


def test_tiles_measured_with_amx_are_not_used_without(model: PackedModel) -> None:
    with_amx = autotune_tile_rows(model, 2, Chip(), AmxUse.AUTO)
    (path,) = compiled_folder().glob("tiles-*")
    kept = path.read_bytes()
    path.unlink()
    chip = Chip()
    without = autotune_tile_rows(model, 2, chip, AmxUse.OFF)
    assert chip.tallest <= default_tile_rows(model).max()
    (path,) = compiled_folder().glob("tiles-*")
    path.write_bytes(kept)  # as if another process's file had got here
    np.testing.assert_array_equal(autotune_tile_rows(model, 2, Chip(), AmxUse.OFF), without)
    assert with_amx.max() == AMX_MEASURED_ROWS > without.max()


def test_amx_can_be_asked_for_without_measuring(model: PackedModel) -> None:
    chip = Chip()
    tuned = autotune_tile_rows(model, 2, chip, AmxUse.ON)
    assert chip.runs == 0
    np.testing.assert_array_equal(tuned, amx_tile_rows(model))
    np.testing.assert_array_equal(tuned[:, :16], default_tile_rows(model)[:, :16])
    assert np.unique(tuned[:, 16:]).tolist() == [16, 48]


def test_float32_products_never_run_on_amx(tiny_folder: Path, model: PackedModel) -> None:
    dense = load_packed(open_checkpoint(tiny_folder), "f32")
    np.testing.assert_array_equal(amx_tile_rows(dense), default_tile_rows(dense))
    assert autotune_tile_rows(dense, 2, Chip(), AmxUse.AUTO).max() == MAX_TILE_ROWS


@pytest.mark.parametrize("text", [b"", b"{", b'{"tile_rows": [[0]]}', b'{"tile_rows": 7}'])
def test_a_file_that_makes_no_sense_is_measured_again(model: PackedModel, text: bytes) -> None:
    chip = Chip()
    tuned = autotune_tile_rows(model, 2, chip)
    (path,) = compiled_folder().glob("tiles-*")
    path.write_bytes(text)
    runs = chip.runs
    np.testing.assert_array_equal(autotune_tile_rows(model, 2, chip), tuned)
    assert chip.runs > runs


def test_a_file_with_an_unknown_prefetch_is_measured_again(model: PackedModel) -> None:
    chip = Chip()
    tuned = autotune_tile_rows(model, 2, chip)
    (path,) = compiled_folder().glob("tiles-*")
    spoiled = tuned.copy()
    spoiled[QKV_TILES, PREFETCH] = 9
    path.write_text(json.dumps({"tile_rows": spoiled.tolist()}))
    np.testing.assert_array_equal(autotune_tile_rows(model, 2, chip), tuned)


def test_without_a_clock_tiles_are_even(model: PackedModel) -> None:
    tuned = autotune_tile_rows(model, 2, lambda *_: np.zeros(len(PHASES), np.int64))
    np.testing.assert_array_equal(tuned, default_tile_rows(model))
