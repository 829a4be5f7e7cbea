"""Matrices and norms by name among packed arrays."""

from pathlib import Path

import numpy as np

from midfill.models.checkpoints.opening import open_model
from midfill.runners.cpu.packed_matrices import packed_matrix, rms_norm

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
