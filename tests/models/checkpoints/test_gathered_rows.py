"""Qwen3-Next's matrices by heads: each module has its own rows, whichever tensor they are in."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import write_variant

from midfill.errors import CheckpointError
from midfill.models.checkpoints.fused_projections import in_key_order
from midfill.models.checkpoints.gathered_rows import gathered_rows
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import tensor_shapes

STATE, ATTENTION = "model.layers.2.linear_attn", "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("qwen3next", tmp_path_factory.mktemp("next") / "tiny")


def test_a_head_of_keys_has_its_heads_of_values_beside_it(folder: Path) -> None:
    checkpoint, stored = open_checkpoint(folder), load_file(folder / "model.safetensors")
    assert {name: checkpoint.tensor(name).shape for name in checkpoint.names()} == tensor_shapes(
        checkpoint.config
    )
    # Two heads of keys: 16 rows of q, 16 of k, 64 of v and 64 of z each.
    first, second = np.split(stored[f"{STATE}.in_proj_qkvz.weight"], 2)
    at = (slice(0, 16), slice(16, 32), slice(32, 96))
    expected = np.concatenate([part[rows] for rows in at for part in (first, second)])
    found = checkpoint.tensor("layers.2.ssm_qkv.weight").to_float32()
    np.testing.assert_array_equal(found, expected)
    gate = checkpoint.tensor("layers.2.ssm_gate.weight").to_float32()
    np.testing.assert_array_equal(gate, np.concatenate((first[96:], second[96:])))
    beta = checkpoint.tensor("layers.2.ssm_beta.weight").to_float32()
    np.testing.assert_array_equal(beta, stored[f"{STATE}.in_proj_ba.weight"][[0, 1, 4, 5]])


def test_queries_and_gates_take_turns_and_a_part_of_queries_turns(folder: Path) -> None:
    checkpoint, stored = open_checkpoint(folder), load_file(folder / "model.safetensors")
    by_head = stored[f"{ATTENTION}.q_proj.weight"].reshape(4, 2, 32, 64)
    queries, gates = (by_head[:, half].reshape(128, 64) for half in range(2))
    found = checkpoint.tensor("layers.1.q.weight").to_float32()
    np.testing.assert_array_equal(found, in_key_order(queries, 4, 8))
    found = checkpoint.tensor("layers.1.q_gate.weight").to_float32()
    np.testing.assert_array_equal(found, gates)
    # Norms of heads move with them, and are stored less 1.
    norm = in_key_order(stored[f"{ATTENTION}.q_norm.weight"], 1, 8) + np.float32(1)
    np.testing.assert_array_equal(checkpoint.tensor("layers.1.q_norm.weight").to_float32(), norm)
    own = checkpoint.tensor("layers.2.ssm_norm.weight").to_float32()
    np.testing.assert_array_equal(own, stored[f"{STATE}.norm.weight"])


def test_all_rows_are_given_out_once(folder: Path) -> None:
    for parts in gathered_rows(open_checkpoint(folder).config).values():
        rows = np.sort(np.concatenate(list(parts.values())))
        np.testing.assert_array_equal(rows, np.arange(len(rows)))


@pytest.mark.parametrize("name", [f"{ATTENTION}.q_proj.weight", f"{STATE}.in_proj_ba.weight"])
def test_another_number_of_rows_is_one_clear_line(folder: Path, name: str, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rows = len(tensors[name])
    tensors[name] = tensors[name][:-1]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"{name!r} has shape .*asks for {rows} rows"):
        open_checkpoint(tmp_path)


def test_of_a_model_that_sees_images_the_part_for_text_is_read(tmp_path: Path) -> None:
    folder = write_variant("qwen35", tmp_path / "text")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    both = tmp_path / "both"
    both.mkdir()
    named = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in tensors.items()
    }
    further = {"model.visual.patch_embed.proj.bias": np.zeros(4, np.float32)}
    further["mtp.fc.weight"] = np.zeros((64, 128), np.float32)
    save_file(named | further, both / "model.safetensors")
    described = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {key: value for key, value in config.items() if key != "architectures"},
        "vision_config": {"depth": 2},
    }
    (both / "config.json").write_text(json.dumps(described))
    text, found = open_checkpoint(folder), open_checkpoint(both)
    assert found.config == text.config
    assert sorted(found.names()) == sorted(text.names())
    for name in text.names():
        expected = text.tensor(name).to_float32()
        np.testing.assert_array_equal(found.tensor(name).to_float32(), expected)
