"""Packed latent attention: in memory once, at its published bytes per token, of known shapes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import write_tiny

from midfill.errors import CheckpointError, OptionError
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.families import config_from_huggingface
from midfill.runners.cpu.packed_model import load_packed
from midfill.runners.cpu.runner import CpuRunner, choose_kv_cache_dtype, slot_bytes

CODER_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


def test_a_token_takes_576_numbers_per_layer() -> None:
    config = config_from_huggingface(CODER_V2_LITE)
    assert slot_bytes(config, KVCacheDtype.F16) == 27 * 576 * 2
    assert slot_bytes(config, KVCacheDtype.F32) == 27 * 576 * 4


def test_scores_are_sharpened_as_the_file_says() -> None:
    config = config_from_huggingface(CODER_V2_LITE)
    sharpened = 0.1 * 0.707 * math.log(40) + 1
    assert config.score_scale == pytest.approx(192**-0.5 * sharpened**2)
    assert config.context == 163840
    experts = config.experts
    assert experts is not None
    assert (experts.shared_ffn, experts.shared_gated) == (2816, False)
    assert experts.dense_layers == (0,)


def test_the_runner_holds_no_more(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("deepseek2", tmp_path))
    runner = CpuRunner.load(checkpoint, slots=20, threads=1, kv_cache_dtype="f32")
    assert runner.kv_bytes == 3 * 20 * (128 + 64) * 4  # layers, slots, numbers, bytes
    assert runner.cells.layout.widths == ((128 + 64) * 4,)
    runner.close()


def test_each_weight_is_in_memory_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("deepseek2", tmp_path / "model", q_lora_rank=64))
    packed = load_packed(checkpoint, "q8", folder=tmp_path / "cache")
    in_memory = {id(m.packed): m.packed.nbytes for m in packed.matrices.values()}
    stored = [matrix.stored_bytes for matrix in packed.matrices.values()]
    assert sum(in_memory.values()) == sum(stored)
    assert np.array_equal(sorted(packed.matrices), sorted(set(packed.matrices)))
    assert {"query", "absorb", "expand"} <= set(packed.matrices)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_lora_rank": 96}, "kv_lora_rank = 96 is not a multiple of 64"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim = 32 is not a multiple of 64"),
        ({"v_head_dim": 48}, "v_head_dim = 48 is not a multiple of 32"),
    ],
    ids=str,
)
def test_a_shape_that_kernels_cannot_run_is_one_clear_line(
    sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    odd = open_checkpoint(write_tiny("deepseek2", tmp_path, **sizes))
    with pytest.raises(CheckpointError, match=f"{message}.* --backend torch"):
        load_packed(odd)


@pytest.mark.parametrize("name", ["i8", "i4"])
def test_keys_that_are_values_are_not_quantised(name: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("deepseek2", tmp_path))
    with pytest.raises(OptionError, match=f"--kv-cache-dtype {name} .* give f16") as caught:
        choose_kv_cache_dtype(checkpoint, "auto", name)
    assert "\n" not in str(caught.value)
