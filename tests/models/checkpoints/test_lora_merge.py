"""Merging a LoRA: its product against NumPy's; its addition to quantised matrices, by each rule."""

from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.kernels.cpu.calls import compile_side_by_side
from midfill.models.checkpoints.lora_merge import (
    BLOCK_LAYOUTS,
    add_to_quantized,
    merge_calls,
    update_matrix,
)
from midfill.models.checkpoints.lora_update import LoraUpdate, Rounding
from midfill.stored_tensor import StoredTensor


@settings(max_examples=30, deadline=None)
@given(
    outputs=st.integers(1, 70), inputs=st.integers(1, 70), rank=st.integers(1, 40),
    scale=st.floats(-4, 4, width=32),
)  # fmt: skip
def test_it_is_the_scaled_product(outputs: int, inputs: int, rank: int, scale: float) -> None:
    update = LoraUpdate(normal(rank, inputs), normal(outputs, rank, seed=1), scale)
    expected = scale * update.up.astype(np.float64) @ update.down
    assert update_matrix(update).dtype == np.float32
    np.testing.assert_allclose(update_matrix(update), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 8])
def test_an_element_is_the_same_bit_for_bit_in_any_matrix(rank: int) -> None:
    down, up = normal(rank, 37), normal(90, rank, seed=1)
    whole = update_matrix(LoraUpdate(down, up, 0.3))
    part = update_matrix(LoraUpdate(down[:, 5:11], up[13:19], 0.3))
    np.testing.assert_array_equal(part, whole[13:19, 5:11])


FloatArray = npt.NDArray[np.floating]

GROUP = 32
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
KEEP_THE_GRID: tuple[Rounding, ...] = ("diffusion", "stochastic")


def stored(kind: str, weights: npt.NDArray[np.float32]) -> StoredTensor:
    """Weights quantised by the gguf library."""
    data = quantize(weights, GGMLQuantizationType[kind.upper()])
    return StoredTensor("w", weights.shape, kind, data.reshape(len(weights), -1))


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(scale)


def steps_of(tensor: StoredTensor) -> FloatArray:
    """The grid step at every weight."""
    blocks = tensor.data.reshape(tensor.shape[0], tensor.shape[1] // GROUP, -1)
    scales = blocks[..., 0:2].copy().view(np.float16)[..., 0].astype(np.float64)
    return np.repeat(np.abs(scales), GROUP, axis=1)


def grid_of(tensor: StoredTensor) -> tuple[FloatArray, FloatArray, npt.NDArray[np.int64]]:
    """Scales and the weights of code 0, both by row and group, and the codes."""
    layout, (rows, inputs) = BLOCK_LAYOUTS[tensor.kind], tensor.shape
    blocks = tensor.data.reshape(rows, inputs // GROUP, -1)
    scales = blocks[..., 0:2].copy().view(np.float16)[..., 0].astype(np.float64)
    origins = -scales * layout.zero
    if layout.has_minimum:
        origins = origins + blocks[..., 2:4].copy().view(np.float16)[..., 0]
    weights = tensor.to_float32().reshape(rows, -1, GROUP).astype(np.float64)
    divisors = np.where(scales == 0, 1, scales)
    codes = np.rint((weights - origins[..., None]) / divisors[..., None])
    return scales, origins, codes.astype(np.int64).reshape(rows, inputs)


def fresh_grid(kind: str, weights: FloatArray) -> tuple[float, float]:
    """Scale and weight of code 0 of a group, both as float16 stores them."""
    layout = BLOCK_LAYOUTS[kind]
    if layout.has_minimum:
        scale = np.float16((weights.max() - weights.min()) / layout.top)
        return float(scale), float(np.float16(weights.min()))
    if kind == "q8_0":
        scale = np.float16(np.abs(weights).max() / 127)
    else:
        scale = np.float16(weights[np.abs(weights).argmax()] / -layout.zero)
    return float(scale), -float(scale) * layout.zero


def dither(row: int, column: int) -> float:
    mask = 2**32 - 1
    mixed = row * 0x9E3779B1 & mask
    mixed ^= column * 0x85EBCA77 + 0x165667B1 & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ mixed >> shift) * factor & mask
    return ((mixed >> 18) + 0.5) / 2**14 - 0.5


def reference(tensor: StoredTensor, update: FloatArray, rounding: Rounding) -> FloatArray:
    """The weights the rule gives, one after the other."""
    top = BLOCK_LAYOUTS[tensor.kind].top
    scales, origins, codes = grid_of(tensor)
    result = np.empty(tensor.shape)
    for row in range(tensor.shape[0]):
        carry = 0.0
        for group in range(tensor.shape[1] // GROUP):
            columns = range(group * GROUP, (group + 1) * GROUP)
            scale, origin = scales[row, group], origins[row, group]
            wanted = [origin + scale * codes[row, c] + update[row, c] for c in columns]
            if rounding == "nearest":
                scale, origin = fresh_grid(tensor.kind, np.array(wanted))
            for column, weight in zip(columns, wanted, strict=True):
                code = (weight + carry - origin) / scale if scale else 0.0
                shifts = {"diffusion": dither(row, 0), "stochastic": dither(row, column)}
                shift = shifts.get(rounding, 0.0)
                code = round(min(max(code, 0), top) + shift)
                result[row, column] = origin + scale * code
                if rounding == "diffusion":
                    carry += weight - result[row, column]
    return result


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_every_rule_equals_its_loop_in_plain_python(kind: str, rounding: Rounding) -> None:
    tensor = stored(kind, normal(21, 3 * GROUP))
    update = normal(21, 3 * GROUP, scale=0.04, seed=1)
    result = add_to_quantized(tensor, update, rounding)
    assert (result.name, result.shape, result.kind) == (tensor.name, tensor.shape, kind)
    assert result.data.shape == tensor.data.shape
    expected = reference(tensor, update.astype(np.float64), rounding)
    np.testing.assert_allclose(result.to_float32(), expected, atol=1e-5)


@pytest.mark.parametrize("rounding", KEEP_THE_GRID)
@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_adding_nothing_changes_nothing(kind: str, rounding: Rounding) -> None:
    layout = BLOCK_LAYOUTS[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (16, 4, layout.size), np.uint8)
    scales = normal(16, 4, 2, scale=0.1).astype(np.float16)
    blocks[..., :4] = scales.view(np.uint8)
    if not layout.has_minimum:
        blocks[..., 2:4] = np.random.default_rng(1).integers(0, 256, (16, 4, 2))
    tensor = StoredTensor("w", (16, 4 * GROUP), kind, blocks.reshape(16, -1))
    result = add_to_quantized(tensor, np.zeros(tensor.shape, np.float32), rounding)
    np.testing.assert_array_equal(result.data, tensor.data)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_memory_order_of_the_update_does_not_matter(rounding: Rounding) -> None:
    tensor, update = stored("q4_1", normal(32, 64)), normal(32, 64, scale=0.1)
    turned = np.asfortranarray(update)
    np.testing.assert_array_equal(
        add_to_quantized(tensor, update, rounding).data,
        add_to_quantized(tensor, turned, rounding).data,
    )


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_nearest_is_within_half_a_step_of_the_new_grid(kind: str) -> None:
    tensor, update = stored(kind, normal(16, 128)), normal(16, 128, scale=0.5, seed=1)
    result = add_to_quantized(tensor, update, "nearest")
    error = np.abs(result.to_float32() - (tensor.to_float32() + update))
    # The grid of q4_0 and q5_0 stops a step short of the weight that is second furthest from 0,
    # on the other side; float16 scales move the ends of all by a little.
    ends = 1.01 if kind in ("q4_0", "q5_0") else 0.51
    assert (error <= ends * steps_of(result) + 1e-3).all()


class TestDiffusion:
    @pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
    def test_the_start_of_a_row_keeps_its_sum_to_a_step(self, kind: str) -> None:
        inside = np.clip(normal(16, 512), -0.9, 0.9)
        inside[:, ::GROUP], inside[:, 1::GROUP] = -3, 3  # so that no other code is an end of a grid
        tensor = stored(kind, inside)
        update = normal(16, 512, scale=0.01, seed=1)
        update[:, ::GROUP] = update[:, 1::GROUP] = 0
        update += np.float32(0.003) * (np.abs(inside) < 2)
        result = add_to_quantized(tensor, update, "diffusion")
        assert (result.data != tensor.data).any()
        changed = result.to_float32().astype(np.float64) - tensor.to_float32()
        errors = np.cumsum(changed - update, axis=1)
        assert (np.abs(errors) <= steps_of(tensor).max() + 1e-4).all()

    def test_a_row_keeps_its_sums_to_a_step_also_at_the_ends_of_the_grid(self) -> None:
        tensor = stored("q4_1", normal(64, 512))
        update = normal(64, 512, scale=0.02, seed=1)
        result = add_to_quantized(tensor, update, "diffusion")
        changed = result.to_float32().astype(np.float64) - tensor.to_float32()
        errors = np.cumsum(changed - update, axis=1)
        assert (np.abs(errors) <= 1.5 * steps_of(tensor).max()).all()

    def test_an_update_far_below_a_step_is_not_lost(self) -> None:
        tensor = stored("q4_0", normal(32, 512))
        update = np.full((32, 512), steps_of(tensor).mean() / 20, np.float32)
        result = add_to_quantized(tensor, update, "diffusion")
        changed = (result.to_float32() - tensor.to_float32()).sum(axis=1)
        np.testing.assert_allclose(changed, update.sum(axis=1), rtol=0.05)

    def test_a_group_without_a_step_passes_its_update_on(self) -> None:
        weights = normal(16, 2 * GROUP)
        weights[:, :GROUP] = 0
        tensor = stored("q4_1", weights)
        update = np.zeros(tensor.shape, np.float32)
        update[:, 0] = 0.3
        result = add_to_quantized(tensor, update, "diffusion")
        changed = result.to_float32() - tensor.to_float32()
        assert (changed[:, :GROUP] == 0).all()
        step = steps_of(tensor)[:, -1]
        assert (np.abs(changed.sum(axis=1) - 0.3) <= step + 1e-4).all()


@pytest.mark.parametrize("rounding", KEEP_THE_GRID)
@pytest.mark.parametrize("share", [0.002, 0.02, 0.3, -0.45])
def test_the_update_is_exact_on_average_over_many_rows(rounding: Rounding, share: float) -> None:
    rows = 8192
    row = np.clip(normal(1, 64), -0.9, 0.9)
    row[:, ::GROUP], row[:, 1::GROUP] = -3, 3  # the only codes at an end of the grid
    tensor = stored("q4_1", np.repeat(row, rows, axis=0))
    step = steps_of(tensor)[0]
    shares = np.full(64, share)
    shares[::GROUP] = shares[1::GROUP] = 0
    update = np.repeat((shares * step).astype(np.float32)[None], rows, axis=0)
    result = add_to_quantized(tensor, update, rounding)
    moved = ((result.to_float32() - tensor.to_float32()) / step).mean(axis=0)
    deviation = np.sqrt(np.abs(shares) * (1 - np.abs(shares)) / rows)
    assert (np.abs(moved - shares) <= 5 * deviation + 1e-6).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_result_is_reproducible(rounding: Rounding) -> None:
    tensor, update = stored("q5_1", normal(48, 64)), normal(48, 64, scale=0.1)
    first, second = (add_to_quantized(tensor, update, rounding).data for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_what_is_compiled_ahead_is_what_merges_run() -> None:
    calls = merge_calls()
    compile_side_by_side(calls)
    compiled = [list(function.signatures) for function, _ in calls]  # type: ignore[attr-defined]
    for kind in BLOCK_LAYOUTS:
        update = LoraUpdate(normal(2, 64), normal(5, 2, seed=1), 0.5)
        add_to_quantized(stored(kind, normal(5, 64, seed=2)), update_matrix(update))
    assert [list(each.signatures) for each, _ in calls] == compiled  # type: ignore[attr-defined]
