"""gpt-oss checkpoints whose experts are in MXFP4, in both file formats, and the same in float32.

Numbers are decoded here as the specification words them, one by one: Open Compute Project, "OCP
Microscaling Formats (MX) Specification", version 1.0, 2023, sections 5.3.3 and 5.4.1.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Blocks:
    """A matrix in MXFP4.

    Attributes:
        codes: uint8 [outputs, blocks, 32], numbers below 16.
        exponents: uint8 [outputs, blocks].
    """

    codes: np.ndarray
    exponents: np.ndarray


def random_blocks(outputs: int, inputs: int, seed: int = 0) -> Blocks:
    """Return numbers of about unit size over the square root of 64."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (outputs, inputs // 32, 32)).astype(np.uint8)
    exponents = random.integers(121, 124, codes.shape[:2]).astype(np.uint8)
    return Blocks(codes, exponents)


def decoded(blocks: Blocks) -> np.ndarray:
    """Return the matrix, float32 [outputs, inputs]."""
    outputs, count, size = blocks.codes.shape
    values = np.zeros((outputs, count, size), np.float64)
    for place in np.ndindex(values.shape):
        code = int(blocks.codes[place])
        sign, exponent, fraction = code >> 3, code >> 1 & 3, code & 1
        magnitude = 2.0 ** (exponent - 1) * (1 + fraction / 2) if exponent else fraction / 2
        scale = 2.0 ** (int(blocks.exponents[place[:2]]) - 127)
        values[place] = (-1) ** sign * magnitude * scale
    return values.reshape(outputs, -1).astype(np.float32)


def as_ggml(blocks: Blocks) -> np.ndarray:
    """Return rows of GGML's blocks, uint8 [outputs, blocks * 17]."""
    low, high = blocks.codes[..., :16], blocks.codes[..., 16:]
    packed = np.concatenate([blocks.exponents[..., None], low | high << 4], axis=-1)
    return packed.astype(np.uint8).reshape(len(packed), -1)


def as_huggingface(blocks: Blocks) -> np.ndarray:
    """Return bytes of two consecutive numbers each, uint8 [outputs, blocks, 16]."""
    return (blocks.codes[..., ::2] | blocks.codes[..., 1::2] << 4).astype(np.uint8)


def write_mxfp4(tiny: Path, exact: Path, quantised: Path) -> dict[str, list[Blocks]]:
    """Write two folders: with random experts in float32, and with the same ones in MXFP4.

    Args:
        tiny: folder of a tiny gpt-oss, whose other tensors they have.
        exact, quantised: the folders.

    Returns:
        name of all experts' matrices -> one of each expert.
    """
    tensors = load_file(tiny / "model.safetensors")
    for folder in (exact, quantised):
        shutil.copytree(tiny, folder)
    stacks: dict[str, list[Blocks]] = {}
    floats, stored = dict(tensors), dict(tensors)
    for name, values in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = values.shape
        stack = [random_blocks(outputs, inputs, len(stacks) * 100 + e) for e in range(experts)]
        stacks[name] = stack
        floats[name] = np.stack([decoded(blocks).T for blocks in stack])
        del stored[name]
        stored[f"{name}_blocks"] = np.stack([as_huggingface(blocks) for blocks in stack])
        stored[f"{name}_scales"] = np.stack([blocks.exponents for blocks in stack])
    save_file({n: np.ascontiguousarray(t) for n, t in floats.items()}, exact / "model.safetensors")
    save_file(stored, quantised / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (quantised / "config.json").write_text(json.dumps(config))
    return stacks


_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def converted(folder: Path, stacks: dict[str, list[Blocks]]) -> Tensors:
    """Return a folder's tensors by GGUF's names; experts' matrices as rows of GGML's blocks."""
    tensors: Tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        module, _, leaf = name.rpartition(".")
        if module in _OUTER:
            tensors[f"{_OUTER[module]}.{leaf}"] = values
            continue
        _, _, layer, inner = name.split(".", 3)
        block = f"blk.{layer}"
        if inner == "self_attn.sinks":
            tensors[f"{block}.attn_sinks.weight"] = values
        elif inner == "mlp.experts.gate_up_proj_bias":
            tensors[f"{block}.ffn_gate_exps.bias"] = np.ascontiguousarray(values[:, ::2])
            tensors[f"{block}.ffn_up_exps.bias"] = np.ascontiguousarray(values[:, 1::2])
        elif inner == "mlp.experts.down_proj_bias":
            tensors[f"{block}.ffn_down_exps.bias"] = values
        elif name in stacks:
            rows = np.stack([as_ggml(blocks) for blocks in stacks[name]])
            if inner.endswith("gate_up_proj"):
                tensors[f"{block}.ffn_gate_exps.weight"] = np.ascontiguousarray(rows[:, ::2])
                tensors[f"{block}.ffn_up_exps.weight"] = np.ascontiguousarray(rows[:, 1::2])
            else:
                tensors[f"{block}.ffn_down_exps.weight"] = rows
        else:
            module, _, leaf = inner.rpartition(".")
            tensors[f"{block}.{_MODULES[module]}.{leaf}"] = values
    return tensors


def write_gguf(path: Path, checkpoint: Checkpoint, tensors: Tensors) -> Path:
    """Write a file as llama.cpp's converter does."""
    config = checkpoint.config
    experts = config.experts
    assert experts is not None
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_expert_feed_forward_length(experts.ffn)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_scaling.factor)
    writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_context)
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    writer.add_eos_token_id(0)
    for name, values in tensors.items():
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_all(tiny: Path, folder: Path) -> dict[str, Checkpoint]:
    """Return one model by the way it is stored: "exact", "folder" and "gguf"."""
    stacks = write_mxfp4(tiny, folder / "exact", folder / "mxfp4")
    exact = open_checkpoint(folder / "exact")
    file = write_gguf(folder / "model.gguf", exact, converted(folder / "exact", stacks))
    return {
        "exact": exact,
        "folder": open_checkpoint(folder / "mxfp4"),
        "gguf": open_checkpoint(file),
    }
