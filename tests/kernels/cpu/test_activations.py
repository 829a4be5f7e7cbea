"""Activations: groups of 32 floats as int8, with the numbers that products need of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from midfill.kernels.cpu.activations import (
    ACTIVATION_BLOCK_BYTES,
    Activations,
    block_at,
    quantize,
    quantize_groups,
    quantize_row,
)

BLOCK = np.dtype(
    [
        ("quants", np.int8, 32),
        ("scale", np.float32),
        ("scaled_sum", np.float32),
        ("offset", np.int32),
        ("half_offset", np.int32),
    ]
)


def naive(groups: np.ndarray) -> np.ndarray:
    """The blocks of groups [n, 32], number by number."""
    blocks = np.zeros(len(groups), BLOCK)
    for block, group in zip(blocks, groups, strict=True):
        largest = np.abs(group).max()
        factor = np.float32(127) / largest if largest > 2.0**-120 else np.float32(0)
        whole = np.rint(group * factor).astype(np.int32)
        block["quants"] = whole
        block["scale"] = largest / np.float32(127)
        block["scaled_sum"] = block["scale"] * np.float32(whole.sum())
        block["offset"] = -128 * whole.sum()
        block["half_offset"] = -128 * whole[:16].sum()
    return blocks


def normal(groups: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(groups, 32))
    return (values * 10.0 ** np.arange(-groups, 0)[:, None]).astype(np.float32)


def blocks_of(groups: np.ndarray) -> np.ndarray:
    data = np.zeros(len(groups) * ACTIVATION_BLOCK_BYTES, np.uint8)
    quantize_row(groups.reshape(-1), 0, groups.size, data, 0)
    return data.view(BLOCK)


@pytest.mark.parametrize("count", range(1, 10))
def test_any_number_of_groups_is_quantised_as_one_by_one(count: int) -> None:
    groups = normal(count)
    np.testing.assert_array_equal(blocks_of(groups), naive(groups))


def test_ties_are_rounded_to_even() -> None:
    group = np.append(np.arange(31) + np.float32(0.5), 127).astype(np.float32)[None]
    np.testing.assert_array_equal(blocks_of(group), naive(group))
    assert blocks_of(group)["quants"][0, :4].tolist() == [0, 2, 2, 4]


def test_a_group_of_zeros_has_a_scale_of_zero() -> None:
    groups = normal(5)
    groups[3] = 0
    blocks = blocks_of(groups)
    np.testing.assert_array_equal(blocks, naive(groups))
    assert blocks["scale"][3] == 0
    assert not blocks["quants"][3].any()


def test_a_group_of_the_smallest_floats_is_zeros() -> None:
    groups = normal(5)
    groups[1] = np.float32(2.0**-126)
    blocks = blocks_of(groups)
    np.testing.assert_array_equal(blocks, naive(groups))
    assert not blocks["quants"][1].any()
    assert blocks["offset"][1] == blocks["scaled_sum"][1] == 0


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 9), st.just(32)),
        elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False),
    )
)
def test_any_floats_are_quantised_as_one_by_one(groups: np.ndarray) -> None:
    np.testing.assert_array_equal(blocks_of(groups), naive(groups))


@pytest.mark.parametrize("count", [1, 4, 6])
def test_groups_may_be_apart_and_so_may_their_blocks(count: int) -> None:
    groups = normal(count)
    x, data = np.full((count, 80), np.nan, np.float32), np.zeros((count, 100), np.uint8)
    x[:, 8:40] = groups
    quantize_groups(x.reshape(-1), 8, 80, count, data.reshape(-1), 12, 100)
    blocks = data[:, 12 : 12 + ACTIVATION_BLOCK_BYTES].copy().view(BLOCK)[:, 0]
    np.testing.assert_array_equal(blocks, naive(groups))
    assert not data[:, :12].any()
    assert not data[:, 12 + ACTIVATION_BLOCK_BYTES :].any()


def test_a_part_of_some_rows_is_quantised_in_place() -> None:
    groups = normal(6)
    rows = Activations(groups.reshape(-1), np.zeros(6 * ACTIVATION_BLOCK_BYTES, np.uint8))
    quantize(rows, 64, 3 * 32)
    blocks = rows.quants.view(BLOCK)
    np.testing.assert_array_equal(blocks[2:5], naive(groups[2:5]))
    assert block_at(64) == 2 * ACTIVATION_BLOCK_BYTES
    assert not rows.quants[: block_at(64)].any()
    assert not rows.quants[block_at(160) :].any()


def test_models_without_quantised_weights_quantise_nothing() -> None:
    quantize(Activations(normal(1).reshape(-1), np.zeros(0, np.uint8)), 0, 32)
