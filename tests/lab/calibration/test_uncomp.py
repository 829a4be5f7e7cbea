"""UNComp's entropy: what it is, and that a measurement repeats."""

from pathlib import Path

import numpy as np
import pytest
from fake_keys import (
    DIM,
    GROUP,
    KV_HEADS,
)
from tiny_checkpoints import write_tiny

from midfill.methods.calibration_store import read
from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.calibration.calibrate import calibrate
from midfill_lab.calibration.uncomp import layer_entropy, matrix_entropy, upper_half


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def test_one_direction_has_no_entropy_and_all_directions_have_all() -> None:
    line = np.linspace(-1, 1, 50)[:, None] * normal(1, 16)
    assert matrix_entropy(line, 16) == pytest.approx(0, abs=1e-6)
    assert matrix_entropy(np.ones((50, 16)), 16) == pytest.approx(0, abs=1e-6)
    assert matrix_entropy(normal(20_000, 16), 16) == pytest.approx(1, abs=1e-3)


def test_entropy_is_that_of_the_largest_eigenvalues() -> None:
    rows = normal(40, 8) * np.arange(1, 9)
    centred = rows - rows.mean(axis=0)
    unit = np.stack([row / np.sqrt((row**2).sum()) for row in centred])
    values = sorted(np.linalg.svd(unit.T @ unit / 40)[1], reverse=True)
    for kept in (2, 8):
        expected = -sum(value * np.log(value) for value in values[:kept]) / np.log(8)
        assert matrix_entropy(rows, kept) == pytest.approx(expected, abs=1e-6)


def test_entropy_does_not_depend_on_the_basis() -> None:
    rows, (rotation, _) = normal(40, 8) * np.arange(1, 9), np.linalg.qr(normal(8, 8))
    assert matrix_entropy(rows @ rotation, 3) == pytest.approx(float(matrix_entropy(rows, 3)))


def test_entropy_does_not_depend_on_how_far_rows_are_from_their_mean() -> None:
    half = normal(20, 8) * np.arange(1, 9)
    lengths = np.random.default_rng(1).uniform(0.1, 10, (20, 1))
    rows, stretched = (np.concatenate((each, -each)) for each in (half, lengths * half))
    assert matrix_entropy(stretched + 3, 3) == pytest.approx(float(matrix_entropy(rows, 3)))


def test_a_kv_heads_entropy_is_the_mean_of_its_query_heads() -> None:
    queries = normal(30, KV_HEADS * GROUP, DIM) * np.arange(1, DIM + 1)
    expected = [
        np.mean([matrix_entropy(queries[:, head * GROUP + i], 2) for i in range(GROUP)])
        for head in range(KV_HEADS)
    ]
    np.testing.assert_allclose(layer_entropy(queries, 2, KV_HEADS), expected, rtol=1e-6)


def test_a_measurement_is_the_same_every_time(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path / "llama"))
    settings = "uncomp:texts=3,tokens=300"
    path = calibrate(settings, checkpoint)
    whole = path.read_text()
    assert calibrate(settings, checkpoint, again=True).read_text() == whole
    found = read(path)
    assert found is not None
    config = checkpoint.config
    assert found.tables["marks"].shape == (config.layers, config.kv_heads)
    assert (found.tables["marks"].sum(axis=1) == 3 * ((config.kv_heads + 1) // 2)).all()
    assert (found.tables["entropy"] > 0).all()


def test_the_upper_half_of_a_layers_heads_is_rounded_up() -> None:
    assert upper_half(np.array([[0.1, 0.3, 0.2], [0.3, 0.2, 0.1]])).tolist() == [
        [0, 1, 1],
        [1, 1, 0],
    ]
