"""LoraUpdate: the product against NumPy's, whatever its sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.models.checkpoints.lora_update import LoraUpdate


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(
    outputs=st.integers(1, 70), inputs=st.integers(1, 70), rank=st.integers(1, 40),
    scale=st.floats(-4, 4, width=32),
)  # fmt: skip
def test_it_is_the_scaled_product(outputs: int, inputs: int, rank: int, scale: float) -> None:
    update = LoraUpdate(normal(rank, inputs), normal(outputs, rank, seed=1), scale)
    expected = scale * update.up.astype(np.float64) @ update.down
    assert update.matrix().dtype == np.float32
    np.testing.assert_allclose(update.matrix(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 8])
def test_an_element_is_the_same_bit_for_bit_in_any_matrix(rank: int) -> None:
    down, up = normal(rank, 37), normal(90, rank, seed=1)
    whole = LoraUpdate(down, up, 0.3).matrix()
    part = LoraUpdate(down[:, 5:11], up[13:19], 0.3).matrix()
    np.testing.assert_array_equal(part, whole[13:19, 5:11])
