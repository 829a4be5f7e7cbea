"""Phi-3's fused projections: each part is that of its rows, in the order that kernels turn them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import write_variant

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.fused_projections import in_key_order
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import tensor_shapes
from serving import torch_runner

QKV = "model.layers.1.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.1.mlp.gate_up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("phi3", tmp_path_factory.mktemp("phi3") / "tiny")


def test_parts_are_runs_of_rows(folder: Path) -> None:
    checkpoint, stored = open_checkpoint(folder), load_file(folder / "model.safetensors")
    shapes = tensor_shapes(checkpoint.config)
    assert {name: checkpoint.tensor(name).shape for name in checkpoint.names()} == shapes
    for fused, names in ((QKV, "qkv"), (GATE_UP, ("gate", "up"))):
        parts = [checkpoint.tensor(f"layers.1.{name}.weight").to_float32() for name in names]
        np.testing.assert_array_equal(np.concatenate(parts), stored[fused])


def test_numbers_that_do_not_turn_come_first_in_each_half() -> None:
    rows = np.arange(16)[:, None]  # two heads of 8, 4 of which are rotated
    expected = [4, 5, 0, 1, 6, 7, 2, 3]
    expected += [8 + row for row in expected]
    assert in_key_order(rows, heads=2, rotated=4)[:, 0].tolist() == expected


def test_only_queries_and_keys_of_which_a_part_is_rotated_are_moved(tmp_path: Path) -> None:
    folder = write_variant("phi3-long", tmp_path)
    checkpoint, stored = open_checkpoint(folder), load_file(folder / "model.safetensors")
    q, k, v = np.split(stored[QKV], [128, 192])
    for name, rows, heads in (("q", q, 4), ("k", k, 2)):
        moved = checkpoint.tensor(f"layers.1.{name}.weight").to_float32()
        np.testing.assert_array_equal(moved, in_key_order(rows, heads, 24))
    np.testing.assert_array_equal(checkpoint.tensor("layers.1.v.weight").to_float32(), v)


@pytest.mark.parametrize("name", [QKV, GATE_UP])
def test_another_number_of_rows_is_one_clear_line(folder: Path, name: str, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rows = len(tensors[name])
    tensors[name] = tensors[name][:-1]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    message = f"{name}' has {rows - 1} rows, the model's configuration asks for {rows}"
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(checkpoint: Checkpoint, path: Path, missing_rows: int = 0) -> Path:
    """Write a Hugging Face folder as llama.cpp's converter does."""
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, "phi3")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_sliding_window(config.sliding_window or 10**6)
    writer.add_eos_token_id(0)
    factors = config.rope_scaling.frequency_factors
    if factors:
        writer.add_rope_scaling_attn_factors(config.rope_scaling.attention_factor or 1.0)
        for kind, values in (("long", factors), ("short", [1.0] * len(factors))):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(values, np.float32))
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, values in load_file(checkpoint.path / "model.safetensors").items():
        module, _, leaf = name.rpartition(".")
        if module not in outer:
            _, _, layer, inner = module.split(".", 3)
            stored = f"blk.{layer}.{MODULES[inner]}"
            rows = len(values) - (missing_rows if stored == "blk.1.attn_qkv" else 0)
            writer.add_tensor(f"{stored}.{leaf}", values[:rows])
        else:
            writer.add_tensor(f"{outer[module]}.{leaf}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("variant", ["phi3", "phi3-long"])
def test_a_gguf_file_is_the_model_of_the_folder(variant: str, tmp_path: Path) -> None:
    theirs = open_checkpoint(write_variant(variant, tmp_path / "folder"))
    ours = open_checkpoint(write_gguf(theirs, tmp_path / "phi3.gguf"))
    assert ours.config.rotated == theirs.config.rotated
    assert ours.config.sliding_window == theirs.config.sliding_window
    assert sorted(ours.names()) == sorted(theirs.names())
    for name in theirs.names():
        expected = theirs.tensor(name).to_float32()
        np.testing.assert_array_equal(ours.tensor(name).to_float32(), expected)
    actual, expected = (
        Stepper(torch_runner(each, slots=64)).prefill(Sequence(list(range(10, 60))))
        for each in (ours, theirs)
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_gguf_file_with_another_number_of_rows_is_one_clear_line(
    folder: Path, tmp_path: Path
) -> None:
    path = write_gguf(open_checkpoint(folder), tmp_path / "phi3.gguf", missing_rows=1)
    message = r"'blk\.1\.attn_qkv\.weight' has 255 rows, the model's configuration asks for 256"
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
