"""Packed layers with the delta rule: in memory once, gates beside them, known shapes."""

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import write_tiny, write_variant

from midfill.errors import CheckpointError
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.packed_delta_rule import QUERY_GATE
from midfill.runners.cpu.packed_model import load_packed
from midfill.runners.cpu.weight_packing import packed_size


@pytest.mark.parametrize("option", ["f32", "q8"])
def test_each_weight_is_in_memory_once(option: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("qwen3next", tmp_path / "model"))
    packed = load_packed(checkpoint, option, folder=tmp_path / "cache")
    assert {"ssm_in", "ssm_out", QUERY_GATE, "experts_in"} <= set(packed.matrices)
    in_memory = {id(m.packed): m.packed.nbytes for m in packed.matrices.values()}
    stored = {id(m.packed): 0 for m in packed.matrices.values()}
    for matrix in packed.matrices.values():
        stored[id(matrix.packed)] += matrix.stored_bytes
    assert in_memory == stored
    # z, q, k, v, and one panel for both b and a.
    assert len(packed.matrices["ssm_in"].panels) == 2 * (128 + 192 + 32) // 32
    assert packed.config.layers == 1
    router = packed.matrices["router"].packed.nbytes
    assert packed_size(checkpoint, option).total == sum(in_memory.values()) - router


def test_norms_of_heads_are_those_of_layers_with_attention(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("qwen35", tmp_path / "model"))
    packed = load_packed(checkpoint, folder=tmp_path / "cache")
    expected = checkpoint.tensor("layers.1.q_norm.weight").to_float32()
    np.testing.assert_array_equal(packed.weights.q_norm.weight, expected)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"linear_value_head_dim": 48}, "linear_value_head_dim = 48 is not a multiple of 32"),
        ({"linear_key_head_dim": 24}, "linear_key_head_dim = 24 is not a multiple of 16"),
        ({"layer_types": ["full_attention"] * 3}, "gated attention in all layers"),
    ],
    ids=str,
)
def test_a_shape_that_kernels_cannot_run_is_one_clear_line(
    sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    odd = open_checkpoint(write_tiny("qwen35", tmp_path, **sizes))
    with pytest.raises(CheckpointError, match=f"{message}.* --backend torch"):
        load_packed(odd)
