"""Gemma as a GGUF file: its own names of norms, whose weights hold the 1 that they add."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from safetensors.numpy import load_file
from tiny_checkpoints import write_variant

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from serving import torch_runner

MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write(folder: Path, checkpoint: Checkpoint, path: Path) -> Path:
    """Write a Hugging Face folder as a converter does."""
    config, modules = checkpoint.config, MODULES
    if config.family == "gemma":
        modules = MODULES | {"post_attention_layernorm": "ffn_norm"}
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    if config.family == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", config.local_rope_theta or 0.0)
        writer.add_float32("gemma3.attention.scale", config.score_scale)
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True])
    writer.add_eos_token_id(0)
    for name, values in load_file(folder / "model.safetensors").items():
        _, *parts, leaf = name.split(".")
        if parts[0] == "layers":
            stored = f"blk.{parts[1]}.{modules['.'.join(parts[2:])]}.{leaf}"
        else:
            stored = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[0]] + f".{leaf}"
        writer.add_tensor(stored, values + np.float32(stored.endswith("norm.weight")))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["gemma", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp("gemma") / "folder")


def logits(checkpoint: Checkpoint) -> np.ndarray:
    stepper = Stepper(torch_runner(checkpoint, slots=64))
    return stepper.runner.forward(stepper.pack([(Sequence(list(range(10, 60))), 50)]))


def test_it_is_the_model_of_the_folder(folder: Path, tmp_path: Path) -> None:
    theirs = open_checkpoint(folder)
    ours = open_checkpoint(write(folder, theirs, tmp_path / "gemma.gguf"))
    assert sorted(ours.names()) == sorted(theirs.names())
    assert ours.config.windowed_layers == theirs.config.windowed_layers
    assert ours.config.embedding_multiplier == theirs.config.embedding_multiplier
    for name in theirs.names():
        expected = theirs.tensor(name).to_float32()
        np.testing.assert_array_equal(ours.tensor(name).to_float32(), expected)
    np.testing.assert_allclose(logits(ours), logits(theirs), atol=1e-4, rtol=1e-4)


def test_norms_of_a_folder_get_their_one(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(
        open_checkpoint(folder).tensor("final_norm.weight").to_float32(), stored + np.float32(1)
    )
