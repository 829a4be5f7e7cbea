"""Latent attention as GGUF files, of old converters and of new ones."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from safetensors.numpy import load_file
from tiny_checkpoints import write_tiny, write_variant

from midfill.config import WeightsOption
from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import LatentAttention
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import torch_runner

MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
    **{f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
}

Tensors = dict[str, np.ndarray]


def converted(folder: Path) -> Tensors:
    """A Hugging Face folder's tensors by the names of old GGUF files."""
    tensors: Tensors = {}
    stacks: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        _, *parts, leaf = name.split(".")
        if parts[:1] != ["layers"]:
            outer = {"embed_tokens": "token_embd", "norm": "output_norm"}
            tensors[f"{outer[parts[0]] if parts else 'output'}.{leaf}"] = values
        elif "experts" in parts:
            stack = f"blk.{parts[1]}.ffn_{parts[5].removesuffix('_proj')}_exps.weight"
            stacks.setdefault(stack, []).append((int(parts[4]), values))
        elif leaf == "e_score_correction_bias":
            tensors[f"blk.{parts[1]}.exp_probs_b.bias"] = values
        else:
            tensors[f"blk.{parts[1]}.{MODULES['.'.join(parts[2:])]}.{leaf}"] = values
    experts = {name: np.stack([each for _, each in sorted(s)]) for name, s in stacks.items()}
    return tensors | experts


def split_heads(tensors: Tensors, latent: LatentAttention) -> Tensors:
    """The same tensors as new converters write them: W_UK, transposed, apart from W_UV."""
    split: Tensors = {}
    for name, values in tensors.items():
        if "attn_kv_b" not in name:
            split[name] = values
            continue
        heads = values.reshape(-1, latent.plain_dim + latent.value_dim, latent.rank)
        keys, expanded = np.split(heads, [latent.plain_dim], axis=1)
        split[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
        split[name.replace("kv_b", "v_b")] = np.ascontiguousarray(expanded)
    return split


def write(
    path: Path, checkpoint: Checkpoint, tensors: Tensors, kind: str = "F32", *, new: bool = False
) -> Path:
    """Write a file as llama.cpp's converter does; matrices of 32s in a kind of the library."""
    config, experts, latent = checkpoint.config, checkpoint.config.experts, checkpoint.config.latent
    assert latent is not None
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(1 if new else config.query_heads)
    if latent.query_rank:
        writer.add_q_lora_rank(latent.query_rank)
    writer.add_kv_lora_rank(latent.rank)
    if new:
        writer.add_key_length(latent.key_dim)
        writer.add_value_length(latent.rank)
        writer.add_key_length_mla(latent.query_dim)
        writer.add_value_length_mla(latent.value_dim)
    else:
        writer.add_key_length(latent.query_dim)
        writer.add_value_length(latent.value_dim)
    writer.add_rope_dimension_count(latent.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_context)
        writer.add_rope_scaling_yarn_log_mul(0.1 * (config.rope_scaling.mscale_all_dim or 0))
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    if experts is not None:
        writer.add_leading_dense_block_count(len(experts.dense_layers))
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.per_token)
        writer.add_expert_feed_forward_length(experts.ffn)
        writer.add_expert_shared_count(experts.shared_ffn // experts.ffn)
        writer.add_expert_weights_scale(experts.weight_factor)
        writer.add_expert_weights_norm(experts.normalised)
        if experts.groups > 1:
            writer.add_expert_group_count(experts.groups)
            writer.add_expert_group_used_count(experts.groups_per_token)
        sigmoid = experts.scoring == "sigmoid"
        functions = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(functions.SIGMOID if sigmoid else functions.SOFTMAX)
    writer.add_eos_token_id(0)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        if kind != "F32" and values.ndim > 1 and not name.endswith("gate_inp.weight"):
            blocks = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, blocks, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


VARIANTS = ["deepseek2", "deepseek2-grouped-yarn", "deepseekv3"]


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp("latent") / "folder")


def logits(runner: Runner) -> np.ndarray:
    return Stepper(runner).prefill(Sequence(list(range(10, 60))))


def test_an_old_file_is_the_model_of_the_folder(folder: Path, tmp_path: Path) -> None:
    theirs = open_checkpoint(folder)
    ours = open_checkpoint(write(tmp_path / "old.gguf", theirs, converted(folder)))
    assert ours.config.latent == theirs.config.latent
    assert ours.config.experts == theirs.config.experts
    assert ours.config.context == theirs.config.context
    assert sorted(ours.names()) == sorted(theirs.names())
    for name in theirs.names():
        expected = theirs.tensor(name).to_float32()
        np.testing.assert_array_equal(ours.tensor(name).to_float32(), expected)
    if theirs.config.rope_scaling.kind == "none":
        assert ours.config.score_scale == theirs.config.score_scale


def test_a_new_file_gives_the_logits_of_an_old_one(folder: Path, tmp_path: Path) -> None:
    theirs, old = open_checkpoint(folder), converted(folder)
    assert theirs.config.latent is not None
    new = split_heads(old, theirs.config.latent)
    files = [
        open_checkpoint(write(tmp_path / "old.gguf", theirs, old)),
        open_checkpoint(write(tmp_path / "new.gguf", theirs, new, new=True)),
    ]
    assert files[1].config.latent == replace(theirs.config.latent, stored_apart=True)
    assert files[0].config.score_scale == files[1].config.score_scale
    expected = logits(torch_runner(files[0], slots=64))
    np.testing.assert_allclose(logits(torch_runner(files[1], slots=64)), expected, atol=1e-5)
    for file in files:
        runner = CpuRunner.load(file, slots=20, threads=2)
        tokens = Sequence(list(range(10, 25)))
        np.testing.assert_allclose(Stepper(runner).prefill(tokens), expected[:15], atol=1e-4)
        runner.close()


def test_yarn_sharpens_scores_as_the_folder_says(tmp_path: Path) -> None:
    theirs = open_checkpoint(write_variant("deepseek2-grouped-yarn", tmp_path / "folder"))
    ours = open_checkpoint(write(tmp_path / "old.gguf", theirs, converted(tmp_path / "folder")))
    assert ours.config.score_scale == pytest.approx(theirs.config.score_scale, rel=1e-6)
    assert ours.config.rope_scaling.mscale == ours.config.rope_scaling.mscale_all_dim


@pytest.mark.parametrize("query_rank", [None, 64], ids=["q", "q_a and q_b"])
@pytest.mark.parametrize("new", [False, True], ids=["kv_b", "k_b and v_b"])
def test_the_kernels_compute_with_quantised_weights(
    new: bool, query_rank: int | None, tmp_path: Path
) -> None:
    # Without experts: rounded activations would send some rows to others.
    dense = {"first_k_dense_replace": 3, "q_lora_rank": query_rank}
    folder = write_tiny("deepseek2", tmp_path / "folder", **dense)
    theirs, tensors = open_checkpoint(folder), converted(folder)
    assert theirs.config.latent is not None
    if new:
        tensors = split_heads(tensors, theirs.config.latent)
    file = open_checkpoint(write(tmp_path / "q8.gguf", theirs, tensors, "Q8_0", new=new))
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


def test_a_file_without_the_heads_matrices_is_one_clear_line(tmp_path: Path) -> None:
    theirs = open_checkpoint(write_variant("deepseek2", tmp_path / "folder"))
    tensors = converted(tmp_path / "folder")
    del tensors["blk.1.attn_kv_b.weight"]
    path = write(tmp_path / "broken.gguf", theirs, tensors)
    with pytest.raises(CheckpointError, match=r"'layers\.1\.kv_b\.weight' is missing") as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
