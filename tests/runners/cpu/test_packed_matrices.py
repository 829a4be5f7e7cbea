"""Matrices and norms by name among packed arrays."""

from pathlib import Path

import numpy as np
import pytest

from midfill.kernels.cpu.rows import LAYER, NormWeights, norm
from midfill.models.checkpoints.opening import open_model
from midfill.runners.cpu.packed_matrices import identity_norm, packed_matrix, rms_norm

BIAS = np.ones(3, np.float32)


def test_a_matrix_is_found_by_its_name() -> None:
    arrays = {"down": np.arange(8, dtype=np.uint8), "down.panels": np.array([[0, 4]])}
    matrix = packed_matrix(arrays, "down", 3, 5, BIAS)
    assert matrix.packed is arrays["down"]
    assert matrix.panels is arrays["down.panels"]
    assert (matrix.outputs, matrix.inputs, matrix.bias is BIAS) == (3, 5, True)


def test_one_that_a_model_lacks_has_no_weights() -> None:
    matrix = packed_matrix({}, "down", 3, 5)
    assert (len(matrix.packed), matrix.panels.shape, len(matrix.bias)) == (0, (0, 2), 0)


def test_a_norm_has_the_models_epsilon_and_no_bias(tiny_folder: Path) -> None:
    config = open_model(tiny_folder).config
    norm = rms_norm(config, np.ones(6, np.float32), 3)
    assert (norm.size, norm.epsilon, len(norm.bias)) == (3, config.norm_epsilon, 0)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e4, 1e8])
def test_the_identity_is_a_norm_that_changes_no_bit(scale: float) -> None:
    before = (np.random.default_rng(0).standard_normal(64) * scale).astype(np.float32)
    before[:2] = 0.0, -0.0
    stored = NormWeights(np.full(128, 0.5, np.float32), np.ones(128, np.float32), 64, LAYER, 1e-5)
    after = before.copy()
    norm(after, 0, identity_norm(stored), 1, after, 0)
    np.testing.assert_array_equal(after.view(np.int32), before.view(np.int32))
