"""Gemma 3n as a GGUF file, by the names and keys that llama.cpp's converter writes."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import write_variant

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from serving import torch_runner

LAYERS = 5
STACKED = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3N, LAYERS)


def stored_name(name: str) -> str:
    """GGUF's name of a tensor, looked up in gguf's own table as the converter does."""
    with_leaf = f"{name}.weight" if name.endswith("_scale") else name
    found = NAMES.get_name(with_leaf, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def write(folder: Path, path: Path, further: dict[str, np.ndarray]) -> Path:
    """Write a Hugging Face folder, and further tensors, as the converter does."""
    config = open_checkpoint(folder).config
    assert config.altup is not None
    writer = gguf.GGUFWriter(path, "gemma3n")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length([config.ffn] * config.layers)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_freq_base_swa(config.local_rope_theta or 0.0)
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_sliding_window_pattern(
        [config.window_of(layer) is not None for layer in range(config.layers)]
    )
    writer.add_final_logit_softcapping(config.logits_cap or 0.0)
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(4)
    writer.add_embedding_length_per_layer_input(config.altup.layer_width)
    writer.add_shared_kv_layers(config.kv_sharing_layers)
    writer.add_activation_sparsity_scale(
        [-math.inf if cut is None else cut for cut in config.gate_cutoffs]
    )
    writer.add_eos_token_id(0)
    tensors = load_file(folder / "model.safetensors") | further
    for theirs, name in STACKED.items():
        parts = [tensors.pop(f"model.{theirs}.{i}.weight") for i in range(3)]
        writer.add_tensor(f"{name}.weight", np.stack(parts))
    for name, values in tensors.items():
        writer.add_tensor(stored_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("gemma3n", tmp_path_factory.mktemp("gemma3n") / "folder")


def keys_of_sharing_layers() -> dict[str, np.ndarray]:
    """What released files hold of layers that share KV, though nothing reads it."""
    shapes = {"k_proj": (64, 64), "v_proj": (64, 64), "k_norm": (32,)}
    return {
        f"model.layers.{layer}.self_attn.{module}.weight": np.ones(shape, np.float32)
        for layer in (3, 4)
        for module, shape in shapes.items()
    }


def logits(checkpoint: Checkpoint) -> np.ndarray:
    return Stepper(torch_runner(checkpoint, slots=64)).prefill(Sequence(list(range(10, 60))))


def assert_same_model(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert sorted(ours.names()) == sorted(theirs.names())
    for name in theirs.names():
        expected = theirs.tensor(name).to_float32()
        np.testing.assert_array_equal(ours.tensor(name).to_float32(), expected)


def test_it_is_the_model_of_the_folder(folder: Path, tmp_path: Path) -> None:
    theirs = open_checkpoint(folder)
    ours = open_checkpoint(write(folder, tmp_path / "model.gguf", keys_of_sharing_layers()))
    assert ours.config.kv_layers == theirs.config.kv_layers == (0, 1, 2)
    assert ours.config.altup == theirs.config.altup
    assert_same_model(ours, theirs)
    np.testing.assert_allclose(logits(ours), logits(theirs), atol=1e-5, rtol=1e-5)


def test_a_folder_as_released_holds_more_than_is_read(folder: Path, tmp_path: Path) -> None:
    """Keys of layers that share KV, and the parts of a model that see images and hear."""
    tensors = load_file(folder / "model.safetensors") | keys_of_sharing_layers()
    named = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    for tower in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        named[f"model.{tower}.weight"] = np.ones((2, 2), np.float32)
    save_file(named, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert_same_model(open_checkpoint(tmp_path), open_checkpoint(folder))


def test_keys_that_a_layer_needs_are_missed(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"'model.layers.2.self_attn.k_proj.weight' is missi"):
        open_checkpoint(tmp_path)
