"""Tile heights are measured once, kept, and read again; what can't be used is measured anew."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from midfill.checkpoints.opening import open_checkpoint
from midfill.kernels.cpu.clock import HEAD, PHASES, QKV
from midfill.kernels.cpu.jit import compiled_folder
from midfill.kernels.cpu.tiles import HEAD_TILES, QKV_TILES
from midfill.runners.packed_model import PackedModel, load_packed
from midfill.runners.tile_choice import choose_tiles, even_plan


class Chip:
    """One on which tiles of two rows are best for qkv, and tall ones for everything else."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, plan: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        self.runs += 1
        ticks = np.full(len(PHASES), 1000, np.int64)
        tallest = int(plan[QKV_TILES].max())
        ticks[QKV] = 100 if tallest == 2 else 200 + tallest
        ticks[HEAD] = 1000 - int(plan[HEAD_TILES].max())
        return ticks


@pytest.fixture
def model(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PackedModel]:
    """A model, with a cache of its own that holds no plans."""
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path))
    compiled_folder.cache_clear()
    yield load_packed(open_checkpoint(tiny_folder), "q4")
    compiled_folder.cache_clear()


def test_the_fastest_heights_are_taken_and_kept(model: PackedModel) -> None:
    chip = Chip()
    plan = choose_tiles(model, 2, chip)
    assert plan[QKV_TILES, 2:].max() == 2
    assert plan[HEAD_TILES].max() == even_plan(model)[HEAD_TILES].max()
    runs = chip.runs
    np.testing.assert_array_equal(choose_tiles(model, 2, chip), plan)
    assert chip.runs == runs
    choose_tiles(model, 1, chip)
    assert chip.runs > runs


@pytest.mark.parametrize("text", [b"", b"{", b'{"plan": [[0]]}', b'{"plan": 7}'])
def test_what_was_kept_and_makes_no_sense_is_measured_again(
    model: PackedModel, text: bytes
) -> None:
    chip = Chip()
    plan = choose_tiles(model, 2, chip)
    (path,) = compiled_folder().glob("tiles-*")
    path.write_bytes(text)
    runs = chip.runs
    np.testing.assert_array_equal(choose_tiles(model, 2, chip), plan)
    assert chip.runs > runs


def test_without_a_clock_tiles_are_even(model: PackedModel) -> None:
    plan = choose_tiles(model, 2, lambda _: np.zeros(len(PHASES), np.int64))
    np.testing.assert_array_equal(plan, even_plan(model))
