"""Hugging Face folders as checkpoints, written here with the safetensors library."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from midfill.errors import CheckpointError, ModelNotFoundError
from midfill.models.checkpoints.huggingface import HuggingFaceCheckpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import tensor_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LAYER_SHAPES = {
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
}
Tensors = dict[str, npt.NDArray[Any]]


def weights() -> Tensors:
    shapes = {
        "model.embed_tokens.weight": (40, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (40, 32),
        **{
            f"model.layers.{layer}.{name}": shape
            for layer in range(2)
            for name, shape in LAYER_SHAPES.items()
        },
    }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A model in one file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: Tensors) -> Path:
    """A model in three files and an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_raw(path: Path, header: object, data: bytes) -> None:
    """A safetensors file with any header."""
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


class TestTensors:
    @pytest.mark.parametrize("writer", [write, write_shards])
    def test_tensors_have_canonical_names(self, tmp_path: Path, writer: Any) -> None:
        stored = weights()
        checkpoint = open_checkpoint(writer(tmp_path / "model", stored))
        expected = tensor_shapes(checkpoint.config)
        assert {name: checkpoint.tensor(name).shape for name in checkpoint.names()} == expected
        for name, theirs in [
            ("embed.weight", "model.embed_tokens.weight"),
            ("lm_head.weight", "lm_head.weight"),
            ("final_norm.weight", "model.norm.weight"),
            ("layers.1.k.weight", "model.layers.1.self_attn.k_proj.weight"),
            ("layers.0.mlp_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
            ("layers.0.down.weight", "model.layers.0.mlp.down_proj.weight"),
        ]:
            tensor = checkpoint.tensor(name)
            assert (tensor.name, tensor.kind) == (name, "f32")
            np.testing.assert_array_equal(tensor.to_float32(), stored[theirs])

    def test_half_precision_is_read_unchanged(self, tmp_path: Path) -> None:
        values = np.array([1.0, -2.5, 3.0e38, 1e-40], np.float32)
        exact_in_bf16 = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        norm = np.tile(exact_in_bf16, 8)
        tensors = weights() | {"model.norm.weight": np.arange(32, dtype=np.float16)}
        folder = write(tmp_path / "model", tensors)
        half = HuggingFaceCheckpoint(folder).tensor("final_norm.weight")
        assert (half.kind, half.data.dtype) == ("f16", np.float16)
        np.testing.assert_array_equal(half.to_float32(), np.arange(32, dtype=np.float32))

        patterns = (norm.view(np.uint32) >> 16).astype("<u2").tobytes()
        path = folder / "model.safetensors"
        size = int.from_bytes(path.read_bytes()[:8], "little")
        header, data = path.read_bytes()[8 : 8 + size], path.read_bytes()[8 + size :]
        entries = json.loads(header)
        start, end = entries["model.norm.weight"]["data_offsets"]
        entries["model.norm.weight"]["dtype"] = "BF16"
        write_raw(path, entries, data[:start] + patterns + data[end:])
        brain = HuggingFaceCheckpoint(folder).tensor("final_norm.weight")
        assert (brain.kind, brain.data.dtype) == ("bf16", np.uint16)
        np.testing.assert_array_equal(brain.to_float32(), norm)

    def test_a_stored_tied_head_is_not_listed(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights(), tie_word_embeddings=True)
        checkpoint = HuggingFaceCheckpoint(folder)
        assert "lm_head.weight" not in checkpoint.names()
        with pytest.raises(CheckpointError, match=r"has no tensor 'lm_head\.weight'"):
            checkpoint.tensor("lm_head.weight")

    def test_tables_that_can_be_computed_are_ignored(self, tmp_path: Path) -> None:
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
        assert HuggingFaceCheckpoint(write(tmp_path / "model", weights() | extra))


class TestWhatElseItHolds:
    def test_metadata_is_what_tokenizer_config_says(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights())
        assert HuggingFaceCheckpoint(folder).metadata == {"general.name": "model"}
        settings_ = {"prefix_token": "<PRE>", "chat_template": "T", "added_tokens_decoder": {}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
        expected = {"general.name": "model", "prefix_token": "<PRE>"}
        assert HuggingFaceCheckpoint(folder).metadata == expected

    def test_the_fingerprint_follows_the_content(self, tmp_path: Path) -> None:
        folder = write_shards(tmp_path / "model", weights())
        first = HuggingFaceCheckpoint(folder).fingerprint
        assert HuggingFaceCheckpoint(folder).fingerprint == first
        shard = folder / "model-1.safetensors"
        before = shard.stat()
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
        changed = HuggingFaceCheckpoint(folder).fingerprint
        assert changed != first
        os.utime(shard, ns=(0, 0))
        touched = HuggingFaceCheckpoint(folder).fingerprint
        assert touched not in (first, changed)
        (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
        assert HuggingFaceCheckpoint(folder).fingerprint not in (first, changed, touched)

    def test_a_missing_tokenizer_is_an_error_at_first_use(self, tmp_path: Path) -> None:
        checkpoint = HuggingFaceCheckpoint(write(tmp_path / "model", weights()))
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: the file is missing"):
            assert checkpoint.tokenizer


def reason_not_to_open(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "").replace(f"{folder}: ", "")


class TestBrokenFolders:
    def test_missing_shards_are_named(self, tmp_path: Path) -> None:
        folder = write_shards(tmp_path / "model", weights())
        (folder / "model-2.safetensors").unlink()
        assert reason_not_to_open(folder).startswith("model-2.safetensors: the file is missing")

    def test_an_index_may_not_point_elsewhere(self, tmp_path: Path) -> None:
        folder = write_shards(tmp_path / "model", weights())
        index = folder / "model.safetensors.index.json"
        for shard in ("../model-1.safetensors", "/etc/passwd", 5, "", ["a"]):
            index.write_text(json.dumps({"weight_map": {"a": shard}}))
            assert "is not the name of a file" in reason_not_to_open(folder)
        index.write_text("{}")
        assert "'weight_map' is missing" in reason_not_to_open(folder)

    def test_a_truncated_file_names_a_tensor_that_is_cut(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights())
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        reason = reason_not_to_open(folder)
        assert reason.startswith("model.safetensors: tensor '")
        assert "truncated; download it again" in reason

    def test_a_header_cut_anywhere_is_an_error(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights())
        path = folder / "model.safetensors"
        data = path.read_bytes()
        for end in range(0, 8 + int.from_bytes(data[:8], "little"), 50):
            path.write_bytes(data[:end])
            assert reason_not_to_open(folder).startswith("model.safetensors: ")

    def test_a_tensor_of_another_shape_is_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights(), intermediate_size=56)
        assert reason_not_to_open(folder) == (
            "tensor 'model.layers.0.mlp.up_proj.weight' has shape [48, 32], the model's "
            "configuration asks for [56, 32]"
        )

    def test_a_missing_tensor_is_named(self, tmp_path: Path) -> None:
        tensors = weights()
        del tensors["model.layers.1.mlp.up_proj.weight"]
        folder = write(tmp_path / "model", tensors)
        assert reason_not_to_open(folder) == "tensor 'model.layers.1.mlp.up_proj.weight' is missing"

    def test_tensors_that_would_change_the_result_are_not_ignored(self, tmp_path: Path) -> None:
        extra = {"model.layers.1.self_attn.q_proj.bias": np.ones(32, np.float32)}
        folder = write(tmp_path / "model", weights() | extra)
        assert "'model.layers.1.self_attn.q_proj.bias' is no part of" in reason_not_to_open(folder)

    def test_types_it_does_not_read_are_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights() | {"model.norm.weight": np.ones(32, np.int8)})
        reason = reason_not_to_open(folder)
        assert "'model.norm.weight' has type I8; midfill reads F32, F16, BF16, F8_E4M3" in reason

    def test_models_in_float8_are_refused(self, tmp_path: Path) -> None:
        tensors = weights() | {"model.norm.weight": np.ones(32, np.uint8)}
        path = write(tmp_path / "model", tensors) / "model.safetensors"
        size = int.from_bytes(path.read_bytes()[:8], "little")
        header, data = path.read_bytes()[8 : 8 + size], path.read_bytes()[8 + size :]
        entries = json.loads(header)
        entries["model.norm.weight"]["dtype"] = "F8_E4M3"
        write_raw(path, entries, data)
        assert "'model.norm.weight' is in float8" in reason_not_to_open(path.parent)

    def test_more_layers_than_tensors_are_refused_at_once(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights(), num_hidden_layers=10**12)
        assert "too few for the 1000000000000 layers" in reason_not_to_open(folder)

    def test_a_tensor_in_two_shards_is_an_error(self, tmp_path: Path) -> None:
        folder = write_shards(tmp_path / "model", weights())
        save_file(weights(), folder / "model-0.safetensors")
        assert "is also in model-" in reason_not_to_open(folder)

    def test_pickles_are_not_loaded(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights())
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        assert reason_not_to_open(folder).startswith("holds PyTorch pickles only")
        (folder / "pytorch_model.bin").unlink()
        assert reason_not_to_open(folder).startswith("holds neither model.safetensors nor")

    def test_a_config_that_is_broken_is_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights(), model_type="mamba")
        assert "model type 'mamba' is not supported" in reason_not_to_open(folder)
        (folder / "config.json").write_text("nonsense")
        assert reason_not_to_open(folder).startswith("config.json: not valid JSON")

    def test_paths_without_a_model_are_errors(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="neither a config"):
            open_checkpoint(tmp_path)
        folder = write(tmp_path / "model", weights())
        with pytest.raises(CheckpointError, match="name the folder it lies in"):
            open_checkpoint(folder / "model.safetensors")

    entries = st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "F16", "X", None, 4]),
            "shape": st.one_of(st.lists(st.integers(-1, 2**63), max_size=3), st.text(max_size=1)),
            "data_offsets": st.lists(st.integers(-1, 2**63), max_size=3),
        },
    )

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.one_of(st.none(), st.dictionaries(st.text(max_size=2), st.one_of(entries, st.text())))
    )
    def test_broken_headers_cause_at_worst_a_clear_error(self, tmp_path: Path, header: Any) -> None:
        folder = write(tmp_path / "model", weights())
        write_raw(folder / "model.safetensors", header, b"\x00" * 64)
        assert reason_not_to_open(folder)
