"""Tile rows are measured once, kept, and read again; a file that makes no sense is replaced."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from midfill.checkpoints.opening import open_checkpoint
from midfill.kernels.cpu.clock import HEAD, PHASES, QKV
from midfill.kernels.cpu.jit import compiled_folder
from midfill.kernels.cpu.tiles import HEAD_TILES, QKV_TILES
from midfill.runners.autotune import autotune_tile_rows, default_tile_rows
from midfill.runners.packed_model import PackedModel, load_packed


class Chip:
    """A chip on which tiles of two rows are fastest for qkv, and tall tiles for the rest."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, tile_rows: npt.NDArray[np.uint8], rows: int) -> npt.NDArray[np.int64]:
        self.runs += 1
        ticks = np.full(len(PHASES), 1000, np.int64)
        tallest = int(tile_rows[QKV_TILES].max())
        ticks[QKV] = 100 if tallest == 2 else 200 + tallest
        ticks[HEAD] = 1000 - int(tile_rows[HEAD_TILES].max())
        return ticks


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
    runs = chip.runs
    np.testing.assert_array_equal(autotune_tile_rows(model, 2, chip), tuned)
    assert chip.runs == runs
    autotune_tile_rows(model, 1, chip)
    assert chip.runs > runs


@pytest.mark.parametrize("text", [b"", b"{", b'{"tile_rows": [[0]]}', b'{"tile_rows": 7}'])
def test_a_file_that_makes_no_sense_is_measured_again(model: PackedModel, text: bytes) -> None:
    chip = Chip()
    tuned = autotune_tile_rows(model, 2, chip)
    (path,) = compiled_folder().glob("tiles-*")
    path.write_bytes(text)
    runs = chip.runs
    np.testing.assert_array_equal(autotune_tile_rows(model, 2, chip), tuned)
    assert chip.runs > runs


def test_without_a_clock_tiles_are_even(model: PackedModel) -> None:
    tuned = autotune_tile_rows(model, 2, lambda *_: np.zeros(len(PHASES), np.int64))
    np.testing.assert_array_equal(tuned, default_tile_rows(model))
