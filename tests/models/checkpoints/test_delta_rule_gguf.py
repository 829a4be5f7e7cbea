"""Models with the delta rule as GGUF files: those of the Hugging Face folders, and what is refused.

Names, shapes and keys are those of gguf-py and of llama.cpp's converter, and so is the order of
rows.
"""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from safetensors.numpy import load_file
from tiny_adapters import write_adapter
from tiny_checkpoints import DELTA_RULE, write_tiny

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint, open_model
from midfill.models.config import DeltaRule
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import torch_runner

MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
KEY_HEADS, KEY_DIM, SERVED, VALUE_DIM = 2, 16, 3, 32
"""Three heads of values share one of keys, so that grouped and tiled orders differ."""

Tensors = dict[str, np.ndarray]


def tiled(values: np.ndarray, size: int) -> np.ndarray:
    """Rows of heads of values in the converter's order: the first of each group, the second ..."""
    by_head = values.reshape(KEY_HEADS, SERVED, size, *values.shape[1:])
    return np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(values.shape)


def converted(folder: Path, family: str) -> Tensors:
    """A folder's tensors as the converter writes them."""
    stored = load_file(folder / "model.safetensors")
    tensors: Tensors = {}
    for name, values in stored.items():
        parts, leaf = name.removeprefix("model.").split(".")[:-1], name.rsplit(".", 1)[-1]
        if parts[0] != "layers":
            values = values + 1 if parts == ["norm"] else values
            tensors[f"{OUTER[parts[0]]}.{leaf}"] = values
            continue
        block, module = f"blk.{parts[1]}", ".".join(parts[2:])
        if ".experts." in f".{module}.":
            _, _, expert, part = parts[2:]
            experts = [stored[name.replace(f"experts.{expert}", f"experts.{i}")] for i in range(8)]
            tensors[f"{block}.ffn_{part.removesuffix('_proj')}_exps.{leaf}"] = np.stack(experts)
        elif module == "linear_attn":
            values = -np.exp(values) if leaf == "A_log" else values
            values = values if family == "qwen3next" else tiled(values, 1)
            tensors[f"{block}.{'ssm_a' if leaf == 'A_log' else 'ssm_dt.bias'}"] = values
        elif module == "linear_attn.in_proj_qkvz":
            by_head = values.reshape(KEY_HEADS, -1, values.shape[1])
            sizes = np.cumsum([KEY_DIM, KEY_DIM, SERVED * VALUE_DIM])
            q, k, v, z = (
                np.ascontiguousarray(part).reshape(-1, values.shape[1])
                for part in np.split(by_head, sizes, axis=1)
            )
            tensors[f"{block}.attn_qkv.weight"] = np.concatenate((q, k, v))
            tensors[f"{block}.attn_gate.weight"] = z
        else:
            if module.endswith(("layernorm", "q_norm", "k_norm")):
                values = values + 1
            if family != "qwen3next" and module.startswith("linear_attn"):
                values = reordered(module, values.squeeze())
            tensors[f"{block}.{MODULES[module]}.{leaf}"] = values.squeeze()
    return tensors


def reordered(module: str, values: np.ndarray) -> np.ndarray:
    """A tensor with its heads of values in tiled order."""
    match module.rpartition(".")[2]:
        case "in_proj_qkv" | "conv1d":
            keys = 2 * KEY_HEADS * KEY_DIM
            return np.concatenate((values[:keys], tiled(values[keys:], VALUE_DIM)))
        case "in_proj_z":
            return tiled(values, VALUE_DIM)
        case "in_proj_a" | "in_proj_b":
            return tiled(values, 1)
        case "out_proj":
            return np.ascontiguousarray(tiled(np.ascontiguousarray(values.T), VALUE_DIM).T)
    return values


def write(
    path: Path,
    checkpoint: Checkpoint,
    tensors: Tensors,
    kind: str = "F32",
    changed: Mapping[str, int] | None = None,
) -> Path:
    """Write a file as llama.cpp's converter does; matrices in a kind of the library."""
    config, rule, changed = checkpoint.config, checkpoint.config.state_space, changed or {}
    assert isinstance(rule, DeltaRule)
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers + changed.get("predictors", 0))
    if "predictors" in changed:
        writer.add_nextn_predict_layers(changed["predictors"])
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_ssm_conv_kernel(rule.conv_width)
    writer.add_ssm_state_size(rule.state_dim)
    writer.add_ssm_group_count(changed.get("key_heads", rule.key_heads))
    writer.add_ssm_time_step_rank(changed.get("heads", rule.heads))
    writer.add_ssm_inner_size(rule.inner)
    writer.add_full_attention_interval(4)
    if config.experts is None:
        writer.add_feed_forward_length(config.ffn)
    else:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.per_token)
        writer.add_expert_feed_forward_length(config.experts.ffn)
        writer.add_expert_shared_feed_forward_length(config.experts.shared_ffn)
    writer.add_eos_token_id(0)
    quantised = gguf.GGMLQuantizationType[kind]
    exact = ("ssm_conv1d", "ssm_ba", "ssm_beta", "ssm_alpha", "inp", "inp_shexp")
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        if kind != "F32" and values.ndim > 1 and not module.endswith(exact):
            blocks = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, blocks, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=DELTA_RULE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta") / request.param
    return write_tiny(request.param, folder, linear_num_value_heads=KEY_HEADS * SERVED)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Checkpoint:
    return open_checkpoint(folder)


def logits(runner: Runner) -> np.ndarray:
    return Stepper(runner).prefill(Sequence(list(range(10, 60))))


def test_it_is_the_model_of_the_folder(folder: Path, theirs: Checkpoint, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", theirs, converted(folder, folder.name))
    ours = open_checkpoint(path)
    rule = ours.config.state_space
    assert isinstance(rule, DeltaRule)
    assert rule.tiled is (folder.name != "qwen3next")
    expected = logits(torch_runner(theirs, slots=64))
    np.testing.assert_allclose(logits(torch_runner(ours, slots=64)), expected, atol=1e-4)


def test_the_kernels_compute_with_quantised_weights(
    folder: Path, theirs: Checkpoint, tmp_path: Path
) -> None:
    """Gates in float32 beside quantised matrices, as files have them."""
    tensors = converted(folder, folder.name)
    path = write(tmp_path / "q8.gguf", theirs, tensors, "Q8_0")
    file = open_checkpoint(path)
    expected = logits(torch_runner(file, slots=64))
    runner = CpuRunner.load(file, slots=64, threads=2, kv_cache_dtype="f32")
    found = logits(runner)
    runner.close()
    # What is left is the rounding of activations to int8.
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < 0.06


def test_older_files_have_what_is_projected_as_one_matrix(tmp_path: Path) -> None:
    folder = write_tiny("qwen3next", tmp_path / "m", linear_num_value_heads=KEY_HEADS * SERVED)
    theirs = open_checkpoint(folder)
    tensors = converted(folder, "qwen3next")
    for layer in (0, 2):
        del tensors[f"blk.{layer}.attn_qkv.weight"]
        del tensors[f"blk.{layer}.attn_gate.weight"]
        stored = load_file(folder / "model.safetensors")
        tensors[f"blk.{layer}.ssm_in.weight"] = stored[
            f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
        ]
    ours = open_checkpoint(write(tmp_path / "old.gguf", theirs, tensors))
    for name in ("ssm_qkv", "ssm_gate", "ssm_beta", "ssm_alpha"):
        expected = theirs.tensor(f"layers.2.{name}.weight").to_float32()
        np.testing.assert_array_equal(ours.tensor(f"layers.2.{name}.weight").to_float32(), expected)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny("qwen35", tmp_path / "m", linear_num_value_heads=KEY_HEADS * SERVED)
    theirs = open_checkpoint(folder)
    tensors = converted(folder, "qwen35")
    last = {name: values for name, values in tensors.items() if name.startswith("blk.1.")}
    further = {name.replace("blk.1.", "blk.3."): values for name, values in last.items()}
    further["blk.3.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    path = write(tmp_path / "mtp.gguf", theirs, tensors | further, changed={"predictors": 1})
    ours = open_checkpoint(path)
    assert ours.config.layers == 3
    assert not [name for name in ours.names() if name.startswith("layers.3.")]


def test_an_adapter_of_heads_in_another_order_is_one_clear_line(tmp_path: Path) -> None:
    folder = write_tiny("qwen35", tmp_path / "m", linear_num_value_heads=KEY_HEADS * SERVED)
    theirs = open_checkpoint(folder)
    path = write(tmp_path / "m.gguf", theirs, converted(folder, "qwen35"))
    adapter = write_adapter(folder, tmp_path / "adapter", target_modules=["q_proj", "in_proj_z"])
    open_model(folder, adapter)
    with pytest.raises(CheckpointError, match="heads in another order there; serve the adapter"):
        open_model(path, adapter)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 7}, "7 heads can't share an inner size of 192"),
        ({"key_heads": 4}, "6 heads of values can't share 4 of keys"),
        ({"key_heads": 3}, r"'blk.0.ssm_conv1d.weight' has shape \[256, 4\].* asks for \[288, 4\]"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_one_clear_line(
    changed: dict[str, int], message: str, tmp_path: Path
) -> None:
    folder = write_tiny("qwen3next", tmp_path / "m", linear_num_value_heads=KEY_HEADS * SERVED)
    theirs = open_checkpoint(folder)
    path = write(tmp_path / "odd.gguf", theirs, converted(folder, "qwen3next"), changed=changed)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
