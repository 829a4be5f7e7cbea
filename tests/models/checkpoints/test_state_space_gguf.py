"""Layers with a state as GGUF files: the model of the Hugging Face folder, and what is turned down.

Names, shapes and keys are those of gguf-py and of llama.cpp's converter.
"""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from safetensors.numpy import load_file
from tiny_checkpoints import write_variant

from midfill.config import WeightsOption
from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import torch_runner

MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "post_attention_layernorm": "ffn_norm",
    "shared_mlp.output_linear": "ffn_down",
}
HEADS = {"q_proj": 4, "k_proj": 2}

Tensors = dict[str, np.ndarray]


def converted(folder: Path) -> Tensors:
    """A folder's tensors as the converter writes them."""
    tensors: Tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        _, *parts, leaf = name.split(".")
        if parts[:1] != ["layers"]:
            tensors[f"{'token_embd' if parts == ['embed_tokens'] else 'output_norm'}.{leaf}"] = (
                values
            )
            continue
        block, module = f"blk.{parts[1]}", ".".join(parts[2:])
        if parts[-1] in HEADS:  # the rotary embedding's halves interleaved
            split = values.reshape(HEADS[parts[-1]], 2, -1, values.shape[-1])
            values = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
        if leaf == "A_log":
            tensors[f"{block}.ssm_a"] = -np.exp(values).reshape(-1, 1)
        elif leaf == "D":
            tensors[f"{block}.ssm_d"] = values.reshape(-1, 1)
        elif leaf == "dt_bias":
            tensors[f"{block}.ssm_dt.bias"] = values
        elif module == "shared_mlp.input_linear":
            gate, up = np.split(values, 2)
            tensors[f"{block}.ffn_gate.{leaf}"] = gate
            tensors[f"{block}.ffn_up.{leaf}"] = up
        elif module == "mamba.norm":
            tensors[f"{block}.ssm_norm.{leaf}"] = values.reshape(1, -1)
        else:
            tensors[f"{block}.{MODULES[module]}.{leaf}"] = values.squeeze()
    return tensors


def write(
    path: Path,
    checkpoint: Checkpoint,
    tensors: Tensors,
    kind: str = "F32",
    changed: Mapping[str, int] | None = None,
) -> Path:
    """Write a file as llama.cpp's converter does; matrices in a kind of the library."""
    config, space = checkpoint.config, checkpoint.config.state_space
    assert space is not None
    writer = gguf.GGUFWriter(path, "granitehybrid")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(999)  # of experts, which the model has none of
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(
        [config.kv_heads * (i in config.attention_layers) for i in range(config.layers)]
    )
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_finetuned(config.has_rope)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_attention_scale(config.score_scale)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_divisor)
    writer.add_ssm_conv_kernel(space.conv_width)
    writer.add_ssm_state_size(space.state_dim)
    writer.add_ssm_inner_size(space.inner)
    writer.add_ssm_time_step_rank((changed or {}).get("heads", space.heads))
    writer.add_ssm_group_count((changed or {}).get("groups", 1))
    if changed and "experts" in changed:
        writer.add_expert_count(changed["experts"])
    writer.add_eos_token_id(0)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        if kind != "F32" and name.endswith("weight") and values.ndim > 1 and values.shape[1] > 4:
            blocks = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, blocks, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("granitehybrid", tmp_path_factory.mktemp("hybrid") / "folder")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Checkpoint:
    return open_checkpoint(folder)


def logits(runner: Runner) -> np.ndarray:
    return Stepper(runner).prefill(Sequence(list(range(10, 60))))


def test_it_is_the_model_of_the_folder(folder: Path, theirs: Checkpoint, tmp_path: Path) -> None:
    ours = open_checkpoint(write(tmp_path / "hybrid.gguf", theirs, converted(folder)))
    assert ours.config.ffn == theirs.config.ffn
    assert ours.config.attention_layers == (1,)
    for name in theirs.names():
        if name.endswith("A_log"):
            found = np.log(-ours.tensor(name.replace("A_log", "A")).to_float32())
            np.testing.assert_allclose(found, theirs.tensor(name).to_float32(), atol=1e-6)
            continue
        expected = theirs.tensor(name).to_float32()
        np.testing.assert_array_equal(ours.tensor(name).to_float32(), expected)
    expected = logits(torch_runner(theirs, slots=64))
    np.testing.assert_allclose(logits(torch_runner(ours, slots=64)), expected, atol=1e-5)


def test_the_kernels_compute_with_quantised_weights(
    folder: Path, theirs: Checkpoint, tmp_path: Path
) -> None:
    file = open_checkpoint(write(tmp_path / "q8.gguf", theirs, converted(folder), "Q8_0"))
    expected = logits(torch_runner(file, slots=64))

    def computed(weights: WeightsOption) -> np.ndarray:
        runner = CpuRunner.load(file, slots=64, threads=2, kv_cache_dtype="f32", weights=weights)
        found = logits(runner)
        runner.close()
        return found

    np.testing.assert_allclose(computed("f32"), expected, atol=1e-4)
    # What is left is the rounding of activations to int8.
    errors = np.linalg.norm(computed("auto") - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < 0.06


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"experts": 62}, r"'expert_count' must be 0: .*350M, 1B, Micro"),
        ({"groups": 2}, "2 groups of heads is not supported"),
        ({"heads": 7}, "7 heads can't share an inner size of 256"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_one_clear_line(
    changed: dict[str, int], message: str, folder: Path, theirs: Checkpoint, tmp_path: Path
) -> None:
    path = write(tmp_path / "odd.gguf", theirs, converted(folder), changed=changed)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_tensor_is_one_clear_line(
    folder: Path, theirs: Checkpoint, tmp_path: Path
) -> None:
    tensors = converted(folder)
    del tensors["blk.2.ssm_d"]
    path = write(tmp_path / "broken.gguf", theirs, tensors)
    with pytest.raises(CheckpointError, match=r"'layers\.2\.ssm\.D' is missing"):
        open_checkpoint(path)
