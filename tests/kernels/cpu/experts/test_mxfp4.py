"""Products with MXFP4: packed without loss, equal to NumPy, and the same bits in any company."""

import numpy as np
import pytest
from mxfp4_checkpoints import Blocks, as_ggml, decoded, random_blocks
from packed_weights import unpack

from midfill.kernels.cpu.activations import ACTIVATION_BLOCK_BYTES, Activations, quantize_row
from midfill.kernels.cpu.experts.mxfp4 import multiply_mxfp4
from midfill.kernels.cpu.linear import PRODUCTS_SIZE, LinearOutput, LinearWeights, Tiling
from midfill.kernels.cpu.packing import PackedMatrix, pack, packed_bytes
from midfill.kernels.cpu.standby import sync_size
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.tiles import PREFETCH, Prefetch, even_tile_rows
from midfill.kernels.cpu.weight_formats import WeightFormat
from midfill.stored_tensor import StoredTensor

OUTPUTS, INPUTS = 96, 160


def tensor(blocks: Blocks) -> StoredTensor:
    outputs, count, _ = blocks.codes.shape
    return StoredTensor("w", (outputs, 32 * count), "mxfp4", as_ggml(blocks))


def packed(blocks: Blocks) -> PackedMatrix:
    return pack([tensor(blocks)], [WeightFormat.MXFP4])


def with_every_exponent() -> Blocks:
    """Return blocks whose exponents are all that scale normal numbers of float32, up to 1e38."""
    blocks = random_blocks(64, 96)
    exponents = np.arange(4, 196, dtype=np.uint8).reshape(64, 3)
    return Blocks(blocks.codes, exponents)


def test_blocks_are_read_as_the_specification_has_them() -> None:
    every_code = np.tile(np.arange(16, dtype=np.uint8), 2).reshape(1, 1, 32)
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected += [-value for value in expected]
    for exponent in (127, 130):
        blocks = Blocks(every_code, np.full((1, 1), exponent, np.uint8))
        values = np.array(expected * 2, np.float32)[None] * 2.0 ** (exponent - 127)
        np.testing.assert_array_equal(decoded(blocks), values)
        np.testing.assert_array_equal(tensor(blocks).to_float32(), values)
        np.testing.assert_array_equal(unpack(packed(blocks)), values)


@pytest.mark.parametrize("blocks", [random_blocks(OUTPUTS, INPUTS), with_every_exponent()])
def test_they_are_packed_without_loss_and_take_no_more_memory(blocks: Blocks) -> None:
    matrix, stored = packed(blocks), tensor(blocks)
    np.testing.assert_array_equal(unpack(matrix), decoded(blocks))
    assert packed_bytes([stored.shape], [WeightFormat.MXFP4]) == stored.data.nbytes


def test_in_eight_bits_they_are_exact_too() -> None:
    blocks = random_blocks(OUTPUTS, INPUTS)
    blocks.codes[3, 1] = 8  # zeros with a sign
    blocks.exponents[3, 1] = 0
    matrix = pack([tensor(blocks)], [WeightFormat.Q8_0])
    np.testing.assert_array_equal(unpack(matrix), decoded(blocks))


def test_scales_that_float16_lacks_are_rounded_in_eight_bits() -> None:
    blocks = with_every_exponent()
    blocks.exponents[:] = 100
    exact = decoded(blocks)
    matrix = pack([tensor(blocks)], [WeightFormat.Q8_0])
    assert np.abs(unpack(matrix) - exact).max() <= 2.0**-24


@pytest.mark.parametrize("weight_format", [WeightFormat.MXFP4, WeightFormat.Q8_0])
def test_a_scale_that_is_no_number_is_refused(weight_format: WeightFormat) -> None:
    blocks = random_blocks(OUTPUTS, INPUTS)
    blocks.exponents[5, 2] = 255
    with pytest.raises(ValueError, match="tensor w: a block's scale is infinite or NaN"):
        pack([tensor(blocks)], [weight_format])


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, INPUTS)).astype(np.float32)


def multiply(
    matrix: PackedMatrix, x: np.ndarray, bias: np.ndarray, prefetch: Prefetch = Prefetch.NONE
) -> np.ndarray:
    blocks = np.zeros(x.size // 32 * ACTIVATION_BLOCK_BYTES, np.uint8)
    quantize_row(x.reshape(-1), 0, x.size, blocks, 0)
    out = np.full((len(x), OUTPUTS + 32), np.nan, np.float32)
    tile_rows = even_tile_rows(4)
    tile_rows[PREFETCH] = prefetch
    multiply_mxfp4(
        ThreadContext(0, 1, np.zeros(sync_size(1), np.int64), np.zeros((1, 16), np.int64)),
        Activations(x.reshape(-1), blocks), 0,
        LinearWeights(matrix.data, matrix.panels, bias, OUTPUTS, INPUTS), 0,
        LinearOutput(
            out.reshape(-1), len(x), OUTPUTS + 32, False, 1.0, np.zeros(0, np.float32), False
        ),
        Tiling(tile_rows, np.empty(PRODUCTS_SIZE, np.float32)),
    )  # fmt: skip
    assert np.isnan(out[:, OUTPUTS:]).all()
    return out[:, :OUTPUTS]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 11])
def test_products_equal_numpy(count: int) -> None:
    blocks, x = random_blocks(OUTPUTS, INPUTS), rows(count)
    bias = np.linspace(-1, 1, OUTPUTS, dtype=np.float32)
    groups = x.reshape(count, -1, 32).astype(np.float64)
    steps = np.abs(groups).max(axis=-1, keepdims=True) / 127
    seen = (np.rint(groups / steps) * steps).reshape(x.shape)
    expected = seen @ decoded(blocks).astype(np.float64).T + bias
    np.testing.assert_allclose(multiply(packed(blocks), x, bias), expected, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_whatever_is_beside_it_and_however_memory_is_read() -> None:
    matrix, x, bias = packed(random_blocks(OUTPUTS, INPUTS)), rows(11), np.zeros(OUTPUTS, "f4")
    each = np.concatenate([multiply(matrix, row[None], bias) for row in x])
    for prefetch in Prefetch:
        np.testing.assert_array_equal(multiply(matrix, x, bias, prefetch), each)
        np.testing.assert_array_equal(multiply(matrix, x[3:8], bias, prefetch), each[3:8])


def test_no_sum_overflows() -> None:
    blocks = random_blocks(OUTPUTS, INPUTS)
    blocks.codes[::2] = 7
    blocks.codes[1::2] = 15
    x = np.ones((3, INPUTS), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    expected = x @ decoded(blocks).T
    np.testing.assert_allclose(
        multiply(packed(blocks), x, np.zeros(OUTPUTS, "f4")), expected, rtol=1e-5, atol=1e-4
    )
