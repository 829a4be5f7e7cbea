"""Packed weights hold GGML blocks exactly, and round floats to within half a step."""

import numpy as np
import pytest
from ggml_blocks import QUANTIZED_KINDS, random_matrix, with_bad_scale
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from packed_weights import unpack

from midfill.kernels.cpu.packing import natural_format, pack, packed_bytes
from midfill.kernels.cpu.weight_formats import WeightFormat, panel_bytes
from midfill.stored_tensor import StoredTensor


def floats(weights: np.ndarray) -> StoredTensor:
    return StoredTensor("w", weights.shape, "f32", weights)


def weights(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows * columns).normal(size=(rows, columns)).astype(np.float32)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_ggml_blocks_are_repacked_without_loss(kind: str) -> None:
    tensor = random_matrix(kind, 70, 512)
    matrix = pack([tensor], [natural_format(kind)])
    assert matrix.panels[:, 1].tolist() == [WeightFormat[kind.upper()]] * 3
    np.testing.assert_array_equal(unpack(matrix), tensor.to_float32())


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_packed_weights_are_hardly_larger_than_ggmls(kind: str) -> None:
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    stored = 64 * 512 // values * size
    assert stored <= packed_bytes([(64, 512)], [natural_format(kind)]) <= 1.04 * stored


def test_a_kind_without_a_format_of_its_own_is_rounded_to_eight_bits() -> None:
    tensor = random_matrix("iq4_xs", 32, 256)
    matrix = pack([tensor], [natural_format("iq4_xs")])
    exact = tensor.to_float32()
    assert np.abs(unpack(matrix) - exact).max() <= np.abs(exact).max() / 250


def test_large_matrices_are_packed_in_parts_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = random_matrix("q6_k", 170, 256)
    whole = pack([tensor], [WeightFormat.Q6_K])
    monkeypatch.setattr("midfill.kernels.cpu.packing._CHUNK_WEIGHTS", 64 * 256)
    parts = pack([tensor], [WeightFormat.Q6_K])
    np.testing.assert_array_equal(parts.data, whole.data)
    np.testing.assert_array_equal(parts.panels, whole.panels)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_scales_that_are_no_numbers_are_refused(kind: str, scale: float) -> None:
    tensor = with_bad_scale(random_matrix(kind, 64, 256), scale)
    with pytest.raises(ValueError, match=r"tensor w: .*infinite or NaN"):
        pack([tensor], [natural_format(kind)])


def test_each_matrix_keeps_its_own_format_in_a_stack() -> None:
    q, k = random_matrix("q4_k", 64, 256), random_matrix("q4_k", 32, 256)
    v = random_matrix("q6_k", 40, 256)
    matrix = pack([q, k, v], [natural_format(each.kind) for each in (q, k, v)])
    expected = np.concatenate([each.to_float32() for each in (q, k, v)])
    np.testing.assert_array_equal(unpack(matrix), expected)


def test_interleaved_matrices_lie_panel_beside_panel() -> None:
    gate, up = random_matrix("q4_k", 96, 256), random_matrix("q6_k", 96, 256)
    formats = [WeightFormat.Q4_K, WeightFormat.Q6_K]
    matrix = pack([gate, up], formats, interleaved=True)
    apart = pack([gate, up], formats)
    np.testing.assert_array_equal(unpack(matrix), unpack(apart))
    assert len(matrix.data) == len(apart.data)
    small, large = (panel_bytes(each, 256) for each in formats)
    starts = [panel * (small + large) + lies for lies in (0, small) for panel in range(3)]
    assert matrix.panels[:, 0].tolist() == starts


def test_matrices_of_different_heights_are_not_interleaved() -> None:
    tensors = [random_matrix("q8_0", 64, 64), random_matrix("q8_0", 96, 64)]
    with pytest.raises(ValueError, match=r"different numbers of outputs: w has 64, w has 96"):
        pack(tensors, [WeightFormat.Q8_0] * 2, interleaved=True)


def test_floats_stay_floats() -> None:
    original = weights(50, 64)
    np.testing.assert_array_equal(unpack(pack([floats(original)], [WeightFormat.F32])), original)


@pytest.mark.parametrize(("target", "steps"), [(WeightFormat.Q8_0, 254), (WeightFormat.Q4_1, 15)])
def test_quantisation_errs_by_at_most_half_a_step(target: WeightFormat, steps: int) -> None:
    original = weights(64, 128)
    error = np.abs(unpack(pack([floats(original)], [target])) - original)
    groups = original.reshape(64, -1, 32)
    if target is WeightFormat.Q8_0:
        span = 2 * np.abs(groups).max(axis=-1)
    else:
        span = groups.max(axis=-1) - groups.min(axis=-1)
    allowed = (span / steps * 0.51 + np.abs(groups).max(axis=-1) * 2e-3)[..., None]
    assert (error.reshape(64, -1, 32) <= allowed).all()


def test_a_constant_group_has_no_step_and_stays_finite() -> None:
    for target in (WeightFormat.Q4_1, WeightFormat.Q8_0):
        constant = np.full((32, 32), 0.5, np.float32)
        unpacked = unpack(pack([floats(constant)], [target]))
        np.testing.assert_allclose(unpacked, constant, rtol=1e-3)
        zero = np.zeros((32, 32), np.float32)
        np.testing.assert_array_equal(unpack(pack([floats(zero)], [target])), zero)


def test_matrices_are_stacked_in_order_and_padded_only_at_the_end() -> None:
    q, k = weights(64, 32), weights(40, 32)
    matrix = pack([floats(q), floats(k)], [WeightFormat.F32] * 2)
    assert matrix.outputs == 104
    np.testing.assert_array_equal(unpack(matrix), np.concatenate([q, k]))
    with pytest.raises(ValueError, match="padding"):
        pack([floats(k), floats(q)], [WeightFormat.F32] * 2)
