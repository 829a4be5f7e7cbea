"""Linear layers: equal to numpy, and bit for bit the same for a row in any batch."""

import numpy as np
import pytest
from ggml_blocks import QUANTIZED_KINDS, random_matrix, with_largest_quants
from packed_weights import unpack

from midfill.kernels.cpu import linear as kernels
from midfill.kernels.cpu.activations import ACTIVATION_BLOCK_BYTES, Activations, quantize_row
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.packing import PackedMatrix, natural_format, pack
from midfill.kernels.cpu.panel_products import MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.standby import sync_size
from midfill.kernels.cpu.thread_pool import ThreadContext, ThreadPool
from midfill.kernels.cpu.tiles import PREFETCH, Prefetch, even_tile_rows
from midfill.kernels.cpu.weight_formats import PANEL, panel_count
from midfill.stored_tensor import StoredTensor

TILE_ROWS = even_tile_rows(MAX_QUANTIZED_ROWS)
KINDS = (*QUANTIZED_KINDS, "f32")
NO_PEAKS = np.zeros(0, np.float32)


def stored(kind: str, outputs: int, inputs: int) -> StoredTensor:
    if kind != "f32":
        return random_matrix(kind, outputs, inputs)
    values = np.random.default_rng(outputs).normal(size=(outputs, inputs)).astype(np.float32)
    return StoredTensor("w", values.shape, kind, values)


def matrix(kind: str, outputs: int, inputs: int) -> PackedMatrix:
    return pack([stored(kind, outputs, inputs)], [natural_format(kind)])


def width(kind: str) -> int:
    """Inputs that fill several blocks of a kind."""
    return 512 if kind.endswith("_k") else 96


def quants(x: np.ndarray) -> np.ndarray:
    """Activation blocks of x [rows, inputs]."""
    blocks = np.zeros(x.size // 32 * ACTIVATION_BLOCK_BYTES, np.uint8)
    quantize_row(x.reshape(-1), 0, x.size, blocks, 0)
    return blocks


def activations(x: np.ndarray) -> Activations:
    return Activations(x.reshape(-1), quants(x))


def as_seen(x: np.ndarray, kind: str) -> np.ndarray:
    """x as a matrix of that kind sees it: quantised to int8 in groups of 32, unless float32."""
    if kind == "f32":
        return x.astype(np.float64)
    groups = x.reshape(len(x), -1, 32).astype(np.float64)
    steps = np.abs(groups).max(axis=-1, keepdims=True) / 127
    return (np.rint(groups / steps) * steps).reshape(x.shape)


def one_thread() -> ThreadContext:
    return ThreadContext(0, 1, np.zeros(sync_size(1), np.int64), np.zeros((1, 16), np.int64))


def linear_weights(matrix: PackedMatrix, bias: np.ndarray | None = None) -> kernels.LinearWeights:
    padded = np.zeros(panel_count(matrix.outputs) * PANEL, np.float32)
    if bias is not None:
        padded[: matrix.outputs] = bias
    return kernels.LinearWeights(matrix.data, matrix.panels, padded, matrix.outputs, matrix.inputs)


def tiling(tile_rows: np.ndarray = TILE_ROWS) -> kernels.Tiling:
    return kernels.Tiling(tile_rows, np.empty(kernels.PRODUCTS_SIZE, np.float32))


def apply(
    weights: PackedMatrix,
    x: np.ndarray,
    bias: np.ndarray | None = None,
    onto: np.ndarray | None = None,
    multiplier: float = 1.0,
    tile_rows: np.ndarray = TILE_ROWS,
) -> np.ndarray:
    width = panel_count(weights.outputs) * PANEL
    out = np.full((len(x), width), np.nan, np.float32) if onto is None else onto.copy()
    kernels.linear(
        one_thread(), activations(x), 0, linear_weights(weights, bias), 0,
        kernels.LinearOutput(
            out.reshape(-1), len(x), width, onto is not None, multiplier, NO_PEAKS, False
        ),
        tiling(tile_rows),
    )  # fmt: skip
    return out[:, : weights.outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_tiles_of_any_height(kind: str) -> None:
    weights = matrix(kind, 70, width(kind))
    x = np.random.default_rng(1).normal(size=(11, width(kind))).astype(np.float32)
    each = np.concatenate([apply(weights, row[None]) for row in x])
    tallest = kernels.MAX_TILE_ROWS if kind == "f32" else MAX_QUANTIZED_ROWS
    for height in range(1, tallest + 1):
        together = apply(weights, x, tile_rows=even_tile_rows(height))
        np.testing.assert_array_equal(together, each)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 11])
def test_prefetches_change_no_bit(kind: str, rows: int) -> None:
    weights = matrix(kind, 70, width(kind))
    x = np.random.default_rng(rows).normal(size=(rows, width(kind))).astype(np.float32)
    results = []
    for prefetch in Prefetch:
        tile_rows = TILE_ROWS.copy()
        tile_rows[PREFETCH] = prefetch
        results.append(apply(weights, x, tile_rows=tile_rows))
    for each in results[1:]:
        np.testing.assert_array_equal(each, results[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 21])
def test_product_equals_numpy(kind: str, rows: int) -> None:
    weights = matrix(kind, 70, width(kind))
    x = np.random.default_rng(rows).normal(size=(rows, width(kind))).astype(np.float32)
    bias = np.arange(70, dtype=np.float32)
    expected = as_seen(x, kind) @ unpack(weights).astype(np.float64).T + bias
    np.testing.assert_allclose(apply(weights, x, bias), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_no_sum_overflows(kind: str) -> None:
    tensor = with_largest_quants(random_matrix(kind, 70, width(kind)))
    weights = pack([tensor], [natural_format(kind)])
    signs = np.ones((7, width(kind)), np.float32)
    signs[1] = -1
    signs[2, ::2] = signs[3, 1::2] = -1
    signs[4, ::4] = signs[5, 16:] = -1
    signs[6, ::32] = 0
    expected = as_seen(signs, kind) @ unpack(weights).astype(np.float64).T
    scale = np.abs(unpack(weights)).sum(axis=1)  # sums of equal numbers may cancel each other out
    assert np.all(np.abs(apply(weights, signs) - expected) <= 1e-6 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_residual_adds_to_what_is_there(kind: str) -> None:
    weights = matrix(kind, 64, width(kind))
    x = np.random.default_rng(1).normal(size=(6, width(kind))).astype(np.float32)
    onto = np.random.default_rng(2).normal(size=(6, 64)).astype(np.float32)
    expected = onto + 0.25 * (as_seen(x, kind) @ unpack(weights).T)
    np.testing.assert_allclose(apply(weights, x, onto=onto, multiplier=0.25), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    weights = matrix(kind, 96, width(kind))
    x = np.random.default_rng(3).normal(size=(23, width(kind))).astype(np.float32)
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
    out_quants = np.zeros(out.size // 32 * ACTIVATION_BLOCK_BYTES, np.uint8)
    weights = kernels.GateUpWeights(
        linear_weights(gate, bias), linear_weights(up, bias), activation, gated
    )
    kernels.gated_linear(
        one_thread(), activations(x), 0, rows, weights, 0,
        Activations(out.reshape(-1), out_quants), tiling(),
    )  # fmt: skip

    def act(v: np.ndarray) -> np.ndarray:
        if activation == kernels.SILU:
            return v / (1 + np.exp(-v))
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))

    raised = as_seen(x, "quantized") @ unpack(up).T.astype(np.float64) + bias
    opened = as_seen(x, "quantized") @ unpack(gate).T.astype(np.float64) + bias
    expected = act(opened) * raised if gated else act(raised)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out_quants, quants(out))


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_looks_up_the_rows_of_the_matrix(kind: str) -> None:
    weights = matrix(kind, 70, width(kind))
    table = unpack(weights)
    for token in (0, 15, 16, 31, 32, 69):
        out = np.empty(width(kind), np.float32)
        embed(token, linear_weights(weights), 1.0, out, 0)
        np.testing.assert_array_equal(out, table[token])


def stacked(layers: list[PackedMatrix], biases: np.ndarray) -> kernels.LinearWeights:
    starts = np.cumsum([0, *(len(layer.data) for layer in layers)])
    panels = [layer.panels + [start, 0] for layer, start in zip(layers, starts, strict=False)]  # noqa: RUF005
    return kernels.LinearWeights(
        np.concatenate([layer.data for layer in layers]), np.concatenate(panels), biases,
        layers[0].outputs, layers[0].inputs,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", [("q4_1", "q4_1"), ("q4_k", "q6_k"), ("q8_0", "f32")])
def test_a_layer_uses_its_own_part_of_the_weights(kinds: tuple[str, str]) -> None:
    size = max(map(width, kinds))
    layers = [matrix(kind, 64, size) for kind in kinds]
    x = np.random.default_rng(6).normal(size=(3, size)).astype(np.float32)
    biases = np.linspace(-1, 1, 128, dtype=np.float32)
    for layer, alone in enumerate(layers):
        out = np.empty((3, 64), np.float32)
        output = kernels.LinearOutput(out.reshape(-1), 3, 64, False, 1.0, NO_PEAKS, False)
        both = stacked(layers, biases)
        kernels.linear(one_thread(), activations(x), 0, both, layer, output, tiling())
        expected = apply(alone, x, biases[layer * 64 : layer * 64 + 64])
        np.testing.assert_array_equal(out, expected)


def test_matrices_of_several_kinds_lie_one_below_the_other() -> None:
    parts = [stored(kind, outputs, 256) for kind, outputs in (("q4_k", 64), ("q6_k", 32))]
    weights = pack(parts, [natural_format(part.kind) for part in parts])
    x = np.random.default_rng(7).normal(size=(5, 256)).astype(np.float32)
    each = [apply(pack([part], [natural_format(part.kind)]), x) for part in parts]
    np.testing.assert_array_equal(apply(weights, x), np.concatenate(each, axis=1))


def test_threads_share_the_panels_and_every_panel_is_computed() -> None:
    weights = matrix("q4_1", 320, 64)
    x = np.random.default_rng(5).normal(size=(5, 64)).astype(np.float32)
    alone = apply(weights, x)
    for threads in (2, 3):
        pool = ThreadPool(threads)
        out = np.full((5, 320), np.nan, np.float32)
        clock = np.zeros((threads, 16), np.int64)
        output = kernels.LinearOutput(out.reshape(-1), 5, 320, False, 1.0, NO_PEAKS, False)

        def phase(
            thread: int, threads: int, sync: np.ndarray, clock: np.ndarray = clock,
            output: kernels.LinearOutput = output,
        ) -> None:  # fmt: skip
            context = ThreadContext(thread, threads, sync, clock)
            kernels.linear(context, activations(x), 0, linear_weights(weights), 0, output, tiling())

        pool.run(phase)
        pool.close()
        np.testing.assert_array_equal(out, alone)
