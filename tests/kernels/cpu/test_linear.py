"""Linear layers: equal to numpy, and bit for bit the same for a row in any batch."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quantize

from midfill.kernels.cpu import linear as kernels
from midfill.kernels.cpu.dots import ROUNDED_BYTES, round_row
from midfill.kernels.cpu.packing import PANEL, PackedMatrix, WeightFormat, pack, panel_count, unpack
from midfill.kernels.cpu.team import SYNC_CELLS, Team
from midfill.kernels.cpu.tiles import even_heights
from midfill.models.stored_tensor import StoredTensor

HEIGHTS = even_heights(kernels.MAX_CODE_ROWS)
KINDS = {"q4_1": WeightFormat.Q4, "q8_0": WeightFormat.Q8, "f32": WeightFormat.F32}


def matrix(kind: str, outputs: int, inputs: int) -> PackedMatrix:
    values = np.random.default_rng(outputs).normal(size=(outputs, inputs)).astype(np.float32)
    data = values if kind == "f32" else quantize(values, GGMLQuantizationType[kind.upper()])
    return pack([StoredTensor("w", values.shape, kind, data)], KINDS[kind])


def rounded(x: np.ndarray) -> np.ndarray:
    """Activation blocks of x [rows, inputs]."""
    blocks = np.zeros(x.size // 32 * ROUNDED_BYTES, np.uint8)
    round_row(x.reshape(-1), 0, x.size, blocks, 0)
    return blocks


def as_seen(x: np.ndarray, kind: str) -> np.ndarray:
    """x as a matrix of that kind sees it: codes meet x rounded to eight bits a group of 32."""
    if kind == "f32":
        return x.astype(np.float64)
    groups = x.reshape(len(x), -1, 32).astype(np.float64)
    steps = np.abs(groups).max(axis=-1, keepdims=True) / 127
    return (np.rint(groups / steps) * steps).reshape(x.shape)


def apply(
    weights: PackedMatrix,
    x: np.ndarray,
    bias: np.ndarray | None = None,
    onto: np.ndarray | None = None,
    multiplier: float = 1.0,
    heights: np.ndarray = HEIGHTS,
) -> np.ndarray:
    rows = len(x)
    width = panel_count(weights.outputs) * PANEL
    padded_bias = np.zeros(width, np.float32)
    if bias is not None:
        padded_bias[: weights.outputs] = bias
    out = np.full((rows, width), np.nan, np.float32) if onto is None else onto.copy()
    kernels.linear(
        np.zeros(SYNC_CELLS, np.int64), 1, x.reshape(-1), rounded(x), 0, rows, weights.inputs,
        weights.data, 0, int(weights.weight_format), weights.outputs, padded_bias, 0,
        out.reshape(-1), width, onto is not None, multiplier, heights,
        np.empty(kernels.MAX_TILE_ROWS * PANEL, np.float32),
    )  # fmt: skip
    return out[:, : weights.outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_tiles_of_any_height(kind: str) -> None:
    weights = matrix(kind, 70, 96)
    x = np.random.default_rng(1).normal(size=(11, 96)).astype(np.float32)
    each = np.concatenate([apply(weights, row[None]) for row in x])
    tallest = kernels.MAX_TILE_ROWS if kind == "f32" else kernels.MAX_CODE_ROWS
    for height in range(1, tallest + 1):
        together = apply(weights, x, heights=even_heights(height))
        np.testing.assert_array_equal(together, each)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 21])
def test_product_equals_numpy(kind: str, rows: int) -> None:
    weights = matrix(kind, 70, 96)
    x = np.random.default_rng(rows).normal(size=(rows, 96)).astype(np.float32)
    bias = np.arange(70, dtype=np.float32)
    expected = as_seen(x, kind) @ unpack(weights).astype(np.float64).T + bias
    np.testing.assert_allclose(apply(weights, x, bias), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_residual_adds_to_what_is_there(kind: str) -> None:
    weights = matrix(kind, 64, 32)
    x = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)
    onto = np.random.default_rng(2).normal(size=(6, 64)).astype(np.float32)
    expected = onto + 0.25 * (as_seen(x, kind) @ unpack(weights).T)
    np.testing.assert_allclose(apply(weights, x, onto=onto, multiplier=0.25), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    weights = matrix(kind, 96, 128)
    x = np.random.default_rng(3).normal(size=(23, 128)).astype(np.float32)
    together = apply(weights, x)
    for size in (1, 2, 3, 4, 7, 9):
        parts = [apply(weights, x[i : i + size]) for i in range(0, len(x), size)]
        np.testing.assert_array_equal(np.concatenate(parts), together)


@pytest.mark.parametrize("activation", [kernels.SILU, kernels.GELU_TANH])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [2, 11])
def test_gated_mlp_equals_numpy(activation: int, gated: bool, rows: int) -> None:
    gate, up = matrix("q8_0", 64, 96), matrix("q4_1", 64, 96)
    x = np.random.default_rng(rows).normal(size=(rows, 96)).astype(np.float32) / 4
    bias = np.linspace(-1, 1, 64, dtype=np.float32)
    out = np.empty((rows, 64), np.float32)
    rounded_out = np.zeros(out.size // 32 * ROUNDED_BYTES, np.uint8)
    kernels.gated_linear(
        np.zeros(SYNC_CELLS, np.int64), 1, x.reshape(-1), rounded(x), 0, rows, 96, gate.data,
        up.data, 0, 0, int(gate.weight_format), int(up.weight_format), 64, gated, bias, bias, 0,
        activation, out.reshape(-1), rounded_out, HEIGHTS,
        np.empty(2 * kernels.MAX_TILE_ROWS * PANEL, np.float32),
    )  # fmt: skip

    def act(v: np.ndarray) -> np.ndarray:
        if activation == kernels.SILU:
            return v / (1 + np.exp(-v))
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))

    raised = as_seen(x, "codes") @ unpack(up).T.astype(np.float64) + bias
    opened = as_seen(x, "codes") @ unpack(gate).T.astype(np.float64) + bias
    expected = act(opened) * raised if gated else act(raised)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rounded_out, rounded(out))


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_looks_up_the_rows_of_the_matrix(kind: str) -> None:
    weights = matrix(kind, 70, 64)
    table = unpack(weights)
    for token in (0, 15, 16, 31, 32, 69):
        out = np.empty(64, np.float32)
        kernels.embed(token, weights.data, int(weights.weight_format), 64, 1.0, out, 0)
        np.testing.assert_array_equal(out, table[token])


def test_threads_share_the_panels_and_every_panel_is_done() -> None:
    weights = matrix("q4_1", 320, 64)
    x = np.random.default_rng(5).normal(size=(5, 64)).astype(np.float32)
    alone = apply(weights, x)
    width = 320
    for threads in (2, 3):
        team = Team(threads)
        out = np.full((5, width), np.nan, np.float32)

        def phase(thread: int, threads: int, sync: np.ndarray, out: np.ndarray = out) -> None:
            kernels.linear(
                sync, threads, x.reshape(-1), rounded(x), 0, 5, 64, weights.data, 0,
                int(weights.weight_format), 320, np.zeros(width, np.float32), 0, out.reshape(-1),
                width, False, 1.0, HEIGHTS,
                np.empty(kernels.MAX_TILE_ROWS * PANEL, np.float32),
            )  # fmt: skip

        team.run(phase)
        team.close()
        np.testing.assert_array_equal(out, alone)
