"""Packed layers with a state: in memory once, KV for the other layers only, known shapes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import write_tiny, write_variant

from midfill.errors import CheckpointError, OptionError
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.families import config_from_huggingface
from midfill.runners.cpu.packed_model import load_packed
from midfill.runners.cpu.packed_state_space import CpuStates, layer_numbers
from midfill.runners.cpu.runner import choose_kv_cache_dtype, slot_bytes

GRANITE_H_350M: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 2048,
    "shared_intermediate_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "vocab_size": 100352,
    "max_position_embeddings": 32768,
    "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
    "mamba_n_heads": 48,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "position_embedding_type": "nope",
}
"""Sizes of Granite 4.0-H 350M."""


def test_a_token_has_kv_in_the_layers_with_attention_and_a_sequence_one_state() -> None:
    config = config_from_huggingface(GRANITE_H_350M)
    assert config.attention_layers == (10, 13, 17, 27)
    assert slot_bytes(config, KVCacheDtype.F16) == 4 * 4 * 64 * 2 * 2
    space = config.state_space
    assert space is not None
    assert space.state_bytes == 28 * 4 * (1536 * 128 + 3 * (1536 + 256))  # 22.6 MB


def test_layers_are_numbered_among_their_kind() -> None:
    config = config_from_huggingface(
        GRANITE_H_350M | {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2}
    )
    assert layer_numbers(config) == [-1, 0, -2, 1]


def test_each_weight_is_in_memory_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("granitehybrid", tmp_path / "model"))
    packed = load_packed(checkpoint, "q8", folder=tmp_path / "cache")
    assert {"ssm_in", "ssm_out"} <= set(packed.matrices)
    # The embeddings are tied.
    in_memory = {id(m.packed): m.packed.nbytes for m in packed.matrices.values()}
    stored = {id(m.packed): 0 for m in packed.matrices.values()}
    for name, matrix in packed.matrices.items():
        stored[id(matrix.packed)] += 0 if name == "head" else matrix.stored_bytes
    assert in_memory == stored
    assert packed.config.layers == 1


def test_states_are_copied_and_cleared() -> None:
    space = config_from_huggingface(GRANITE_H_350M).state_space
    assert space is not None
    states = CpuStates(space, 3)
    assert states.nbytes == 3 * space.state_bytes
    states.values[:] = 1.0
    states.clear(1)
    states.copy(1, 2)
    parts = states.values.reshape(3, -1)
    assert parts[0].all()
    assert not parts[1:].any()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"mamba_n_heads": 32, "mamba_d_head": 8},
            "mamba_d_head = 8 is not a multiple of 16",
        ),
        ({"mamba_d_state": 40}, "mamba_d_state = 40 is not a multiple of 16"),
    ],
    ids=str,
)
def test_a_shape_that_kernels_cannot_run_is_one_clear_line(
    sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    odd = open_checkpoint(write_tiny("granitehybrid", tmp_path, **sizes))
    with pytest.raises(CheckpointError, match=f"{message}.* --backend torch"):
        load_packed(odd)


@pytest.mark.parametrize("name", ["i8", "i4"])
def test_kv_of_few_bits_is_refused(name: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("granitehybrid", tmp_path))
    with pytest.raises(OptionError, match=f"--kv-cache-dtype {name} .* give f16") as caught:
        choose_kv_cache_dtype(checkpoint, "auto", name)
    assert "\n" not in str(caught.value)
    assert np.isfinite(checkpoint.tensor("layers.0.ssm.A_log").to_float32()).all()
