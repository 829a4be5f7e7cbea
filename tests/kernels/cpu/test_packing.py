"""Packed weights hold GGML blocks exactly, and round floats to within half a step."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize, quantize

from midfill.kernels.cpu.packing import WeightFormat, natural_format, pack, unpack
from midfill.models.stored_tensor import StoredTensor


def stored(kind: str, weights: np.ndarray) -> StoredTensor:
    if kind == "f32":
        return StoredTensor("w", weights.shape, kind, weights)
    data = quantize(weights, GGMLQuantizationType[kind.upper()])
    return StoredTensor("w", weights.shape, kind, data)


def weights(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows * columns).normal(size=(rows, columns)).astype(np.float32)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_ggml_blocks_are_repacked_without_loss(kind: str) -> None:
    tensor = stored(kind, weights(64, 96))
    expected = dequantize(tensor.data, GGMLQuantizationType[kind.upper()])
    matrix = pack([tensor], natural_format(kind))
    assert matrix.weight_format is not WeightFormat.F32
    np.testing.assert_array_equal(unpack(matrix), expected)


def test_four_bit_blocks_fit_exactly_into_eight_bits() -> None:
    tensor = stored("q4_1", weights(32, 64))
    expected = dequantize(tensor.data, GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(unpack(pack([tensor], WeightFormat.Q8)), expected)


def test_floats_stay_floats() -> None:
    original = weights(50, 64)
    np.testing.assert_array_equal(
        unpack(pack([stored("f32", original)], WeightFormat.F32)), original
    )


@pytest.mark.parametrize(("target", "steps"), [(WeightFormat.Q8, 254), (WeightFormat.Q4, 15)])
def test_quantisation_errs_by_at_most_half_a_step(target: WeightFormat, steps: int) -> None:
    original = weights(64, 128)
    error = np.abs(unpack(pack([stored("f32", original)], target)) - original)
    groups = original.reshape(64, -1, 32)
    if target is WeightFormat.Q8:
        span = 2 * np.abs(groups).max(axis=-1)
    else:
        span = groups.max(axis=-1) - groups.min(axis=-1)
    allowed = (span / steps * 0.51 + np.abs(groups).max(axis=-1) * 2e-3)[..., None]
    assert (error.reshape(64, -1, 32) <= allowed).all()


def test_a_constant_group_has_no_step_and_stays_finite() -> None:
    for target in (WeightFormat.Q4, WeightFormat.Q8):
        constant = np.full((32, 32), 0.5, np.float32)
        unpacked = unpack(pack([stored("f32", constant)], target))
        np.testing.assert_allclose(unpacked, constant, rtol=1e-3)
        zero = np.zeros((32, 32), np.float32)
        np.testing.assert_array_equal(unpack(pack([stored("f32", zero)], target)), zero)


def test_matrices_are_stacked_in_order_and_padded_only_at_the_end() -> None:
    q, k = weights(64, 32), weights(40, 32)
    matrix = pack([stored("f32", q), stored("f32", k)], WeightFormat.F32)
    assert matrix.outputs == 104
    np.testing.assert_array_equal(unpack(matrix), np.concatenate([q, k]))
    with pytest.raises(ValueError, match="padding"):
        pack([stored("f32", k), stored("f32", q)], WeightFormat.F32)
