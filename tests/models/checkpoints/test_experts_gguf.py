"""Mixtures of experts as GGUF files: a layer's experts are one tensor there, and can be missing."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from safetensors.numpy import load_file
from tiny_checkpoints import write_variant

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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
    **{f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
}

Tensors = dict[str, np.ndarray]


def converted(folder: Path) -> Tensors:
    """A Hugging Face folder's tensors by GGUF's names, the experts of a layer stacked."""
    tensors: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        _, *parts, leaf = name.split(".")
        if parts[:1] != ["layers"]:
            outer = {"embed_tokens": "token_embd", "norm": "output_norm"}
            tensors[f"{outer[parts[0]] if parts else 'output'}.{leaf}"] = values
        elif "experts" in parts:
            stack = f"blk.{parts[1]}.ffn_{parts[5].removesuffix('_proj')}_exps.weight"
            stacks.setdefault(stack, {})[int(parts[4])] = values
        else:
            module = MODULES[".".join(parts[2:])]
            values = values[0] if module == "ffn_gate_inp_shexp" else values  # a vector there
            tensors[f"blk.{parts[1]}.{module}.{leaf}"] = values
    return tensors | {
        name: np.stack([held[i] for i in range(len(held))]) for name, held in stacks.items()
    }


def write(
    path: Path, checkpoint: Checkpoint, tensors: Tensors, kind: str = "F32", **changed: int
) -> Path:
    """Write a file as a converter does; matrices of MLPs in a kind of the gguf library."""
    config = checkpoint.config
    experts = config.experts
    assert experts is not None
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
    writer.add_expert_count(changed.get("count", experts.count))
    writer.add_expert_used_count(changed.get("per_token", experts.per_token))
    if config.family != "olmoe":  # whose files state one size for both
        writer.add_expert_feed_forward_length(experts.ffn)
    if experts.shared_ffn:
        writer.add_expert_shared_feed_forward_length(experts.shared_ffn)
    writer.add_eos_token_id(0)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        if kind != "F32" and name.endswith(("exps.weight", "shexp.weight")) and values.ndim > 1:
            blocks = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, blocks, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["olmoe", "qwen2moe", "qwen3moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp("experts") / "folder")


def logits(runner: Runner) -> np.ndarray:
    return Stepper(runner).prefill(Sequence(list(range(10, 60))))


def test_it_is_the_model_of_the_folder(folder: Path, tmp_path: Path) -> None:
    theirs = open_checkpoint(folder)
    ours = open_checkpoint(write(tmp_path / "experts.gguf", theirs, converted(folder)))
    # What GGUF doesn't say of the experts follows from the architecture.
    assert ours.config.experts == theirs.config.experts
    assert sorted(ours.names()) == sorted(theirs.names())
    for name in theirs.names():
        expected = theirs.tensor(name).to_float32()
        np.testing.assert_array_equal(ours.tensor(name).to_float32(), expected)
    assert len(ours.content_digest) == len(theirs.content_digest)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_the_kernels_compute_with_quantised_experts(
    folder: Path, kind: str, tmp_path: Path
) -> None:
    theirs = open_checkpoint(folder)
    file = open_checkpoint(write(tmp_path / "experts.gguf", theirs, converted(folder), kind))
    assert file.kind("layers.0.experts.1.up.weight") == kind.lower()
    runner = CpuRunner.load(file, slots=64, threads=2, kv_cache_dtype="f32")
    actual, expected = logits(runner), logits(torch_runner(file, slots=64))
    runner.close()
    # Activations are rounded to int8, which sends a few rows to another expert.
    errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < 0.03


@pytest.mark.parametrize(
    ("change", "numbers", "message"),
    [
        (
            lambda tensors: tensors.pop("blk.1.ffn_up_exps.weight"),
            {},
            r"tensor 'layers\.1\.experts\.0\.up\.weight' is missing",
        ),
        (
            lambda tensors: tensors.pop("blk.1.ffn_gate_inp.weight"),
            {},
            r"tensor 'layers\.1\.router\.weight' is missing",
        ),
        (
            lambda tensors: tensors.update(
                {"blk.2.ffn_down_exps.weight": tensors["blk.2.ffn_down_exps.weight"][:5]}
            ),
            {},
            r"'blk\.2\.ffn_down_exps\.weight' holds 5 experts, .* asks for (8|10)",
        ),
        (lambda tensors: None, {"per_token": 11}, "can't be sent to 11 of (8|10) experts"),
        (lambda tensors: None, {"count": 10**9}, "too few for the 1000000000 experts|holds"),
    ],
    ids=["no matrix", "no router", "another number", "more per token", "a billion"],
)
def test_a_broken_file_is_one_line_that_says_what_is_wrong(
    folder: Path,
    change: Callable[[Tensors], object],
    numbers: dict[str, int],
    message: str,
    tmp_path: Path,
) -> None:
    tensors = converted(folder)
    change(tensors)
    path = write(tmp_path / "broken.gguf", open_checkpoint(folder), tensors, **numbers)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_folder_may_hold_the_experts_of_a_layer_in_one_tensor(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    theirs, ours = open_checkpoint(folder), open_checkpoint(tmp_path)
    assert sorted(ours.names()) == sorted(theirs.names())
    for name in theirs.names():
        expected = theirs.tensor(name).to_float32()
        np.testing.assert_array_equal(ours.tensor(name).to_float32(), expected)
