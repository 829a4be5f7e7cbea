"""OLMo 2 and Olmo 3 as GGUF files, where both have one name."""

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
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(folder: Path, checkpoint: Checkpoint, path: Path) -> Path:
    """Write a Hugging Face folder as a converter does; rows of q and k stay where they are."""
    config, scaling = checkpoint.config, checkpoint.config.rope_scaling
    writer = gguf.GGUFWriter(path, "olmo2")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    if scaling.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_attn_factors(1 + 0.1 * np.log(scaling.factor))
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        windows = [config.window_of(layer) is not None for layer in range(config.layers)]
        writer.add_array("olmo2.attention.sliding_window_pattern", windows)
    writer.add_eos_token_id(0)
    for name, values in load_file(folder / "model.safetensors").items():
        module, leaf = name.rsplit(".", 1)
        if module.startswith("model.layers."):
            _, _, layer, own = module.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{MODULES[own]}.{leaf}", values)
        else:
            writer.add_tensor(f"{OUTER[module]}.{leaf}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(checkpoint: Checkpoint) -> np.ndarray:
    return Stepper(torch_runner(checkpoint, slots=64)).prefill(Sequence(list(range(10, 60))))


@pytest.mark.parametrize("variant", ["olmo2", "olmo3"])
def test_it_is_the_model_of_the_folder(variant: str, tmp_path: Path) -> None:
    folder = write_variant(variant, tmp_path / "folder")
    theirs = open_checkpoint(folder)
    ours = open_checkpoint(write(folder, theirs, tmp_path / "olmo.gguf"))
    assert ours.config.family == "olmo2"
    assert sorted(ours.names()) == sorted(theirs.names())
    windows = [theirs.config.window_of(layer) for layer in range(theirs.config.layers)]
    assert [ours.config.window_of(layer) for layer in range(ours.config.layers)] == windows
    assert windows == ([None] * 3 if variant == "olmo2" else [24, None, 24])
    for name in theirs.names():
        expected = theirs.tensor(name).to_float32()
        np.testing.assert_array_equal(ours.tensor(name).to_float32(), expected)
    np.testing.assert_allclose(logits(ours), logits(theirs), atol=1e-5, rtol=1e-5)
