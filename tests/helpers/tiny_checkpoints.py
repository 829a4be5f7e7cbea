"""Tiny random checkpoints of every family, written by transformers, for tests to run on.

A checkpoint takes milliseconds to write and run, yet has what makes architectures differ: grouped
queries, heads wider than hidden / heads where a family allows it, weights and biases far from
their trivial values. All sizes are multiples of 32, so that every kernel can run them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    import torch

VOCAB = 320
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<fim_prefix>", "<fim_middle>", "<fim_suffix>")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_MERGES = """
Ġ+Ġ ĠĠ+ĠĠ ĠĠ+Ġ e+r Ġ+" Ċ+ĠĠĠ "+: i+n e+n t+o a+r a+m Ċ+ĠĠĠĠ o+n a+n d+e i+t i+z a+l r+o k+en
o+r e+t Ġ+t in+g a+t Ġ+= to+ken "+" f+i e+d l+l ĊĠĠĠĠ+ĠĠĠ iz+er s+t Ġ+{ h+e ĠĠĠĠ+ĠĠĠ to+r o+de
p+e s+e d+er i+an ar+ian token+izer ode+l arian+t i+d Ġ+V Ġ+f Ġ+m )+, Ġ+w am+a ll+ama r+e Ġ+c
t+i ĠV+ariant
"""
"""The tokenizer's merges in order: what byte-level BPE learns from Python about tokenizers."""

_WIDE_HEADS = {"head_dim": 32}  # 4 heads of 32 beside a hidden size of 64
_HEADS_OF_HIDDEN = {"hidden_size": 128}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
_DELTA_RULE = _WIDE_HEADS | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_SHARED_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}

_FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": _WIDE_HEADS | {"rms_norm_eps": 1e-5},
    "granite": _HEADS_OF_HIDDEN
    | {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.5,
    },
    "granitehybrid": _HEADS_OF_HIDDEN
    | {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.5,
        "num_local_experts": 0,
        "shared_intermediate_size": 160,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    },
    "qwen2": _HEADS_OF_HIDDEN | {"tie_word_embeddings": True},
    "qwen3": _WIDE_HEADS,
    "qwen2moe": _HEADS_OF_HIDDEN
    | {
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    },
    "qwen3moe": _WIDE_HEADS
    | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "qwen3next": _DELTA_RULE | _SHARED_EXPERTS,
    "qwen35": _DELTA_RULE | {"tie_word_embeddings": True},
    "qwen35moe": _DELTA_RULE | _SHARED_EXPERTS,
    "deepseek2": _LATENT
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
    },
    "deepseekv3": _LATENT
    | {
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
    },
    "starcoder2": _HEADS_OF_HIDDEN
    | {"sliding_window": 40, "tie_word_embeddings": True, "bos_token_id": 0},
    "mistral": _WIDE_HEADS | {"sliding_window": 24},
    "gemma": _WIDE_HEADS | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma3": _WIDE_HEADS
    | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "query_pre_attn_scalar": 50,
        "rope_theta": 100_000.0,
        "rope_local_base_freq": 1000.0,
        "tie_word_embeddings": True,
    },
    "gemma3n": _WIDE_HEADS
    | {
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "num_kv_shared_layers": 2,
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
        "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0, 0.0],
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 256,
        "laurel_rank": 32,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    "olmo2": _HEADS_OF_HIDDEN,
    "olmo3": _HEADS_OF_HIDDEN
    | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 50_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 50_000.0},
        },
    },
    "olmoe": _HEADS_OF_HIDDEN
    | {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96},
    "phi3": _HEADS_OF_HIDDEN | {"pad_token_id": None},
    "gpt-oss": _WIDE_HEADS
    | {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "sliding_window": 24,
        "swiglu_limit": 0.9,  # which some numbers exceed
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
}
_MODEL_TYPES = {
    "deepseek2": "deepseek_v2",
    "deepseekv3": "deepseek_v3",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granitemoehybrid",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
"""Families that have another name in transformers."""


@dataclass(frozen=True)
class Variant:
    """A family with some of its config.json fields set."""

    family: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


VARIANTS: Mapping[str, Variant] = {
    "llama": Variant("llama"),
    "llama-tied": Variant("llama", {"tie_word_embeddings": True}),
    "llama-biased": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": Variant("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": Variant(
        "llama",
        {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "llama-yarn": Variant(
        "llama",
        {
            "max_position_embeddings": 256,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-llama3": Variant(
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "granite": Variant("granite"),
    "granitehybrid": Variant("granitehybrid"),
    "granitehybrid-attention": Variant(
        "granitehybrid",
        {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
    ),
    "qwen2": Variant("qwen2"),
    "qwen2-windowed": Variant(
        "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    ),
    "qwen3": Variant("qwen3"),
    "starcoder2": Variant("starcoder2"),
    "mistral": Variant("mistral"),
    "gemma": Variant("gemma"),
    "gemma3": Variant("gemma3"),
    "gemma3n": Variant("gemma3n"),
    "olmo2": Variant("olmo2"),
    "olmo3": Variant("olmo3"),
    "olmoe": Variant("olmoe"),
    "qwen2moe": Variant("qwen2moe"),
    "qwen3moe": Variant("qwen3moe"),
    "qwen3moe-dense-layers": Variant(
        "qwen3moe", {"mlp_only_layers": [1], "norm_topk_prob": False, "num_experts_per_tok": 8}
    ),
    "qwen3next": Variant("qwen3next"),
    "qwen35": Variant("qwen35"),
    "qwen35moe": Variant("qwen35moe"),
    "deepseek2": Variant("deepseek2"),
    "deepseek2-grouped-yarn": Variant(
        "deepseek2",
        {
            "q_lora_rank": 64,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 256,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    "deepseekv3": Variant("deepseekv3", {"q_lora_rank": 64}),
    "gpt-oss": Variant("gpt-oss"),
    "phi3": Variant("phi3", {"sliding_window": 30}),
    "phi3-long": Variant(
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 12,
                "long_factor": [1.0 + 0.3 * i for i in range(12)],
            },
        },
    ),
}

DELTA_RULE = ("qwen3next", "qwen35", "qwen35moe")
"""Those with the delta rule in some layers."""

TRAINED = [
    name
    for name, variant in VARIANTS.items()
    if variant.family
    not in (
        "deepseek2",
        "deepseekv3",
        "gemma",
        "gemma3",
        "gemma3n",
        "gpt-oss",
        "granitehybrid",
        "olmo3",
        "olmoe",
        "phi3",
        "qwen2moe",
        "qwen3moe",
        *DELTA_RULE,
    )
]
"""Those that the lab can train."""

STATELESS = [name for name in VARIANTS if name not in ("granitehybrid", *DELTA_RULE)]
"""Those without layers that have a state, so that any cached prefix can be continued."""


def write_variant(name: str, folder: Path) -> Path:
    """Write one of ``VARIANTS`` into ``folder``, which is returned."""
    variant = VARIANTS[name]
    return write_tiny(variant.family, folder, **variant.overrides)


def write_tiny(family: str, folder: Path, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and a tokenizer of one family into ``folder``.

    The weights are the same on every call. ``overrides`` are fields of config.json. Without torch
    there are only Llamas, of other weights: the test that asks for another family is skipped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if family == "llama" and find_spec("torch") is None:
        _write_llama(folder, _SIZES | _FAMILIES[family] | overrides)
        return folder
    pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type = _MODEL_TYPES.get(family, family)
    config = AutoConfig.for_model(model_type, **(_SIZES | _FAMILIES[family] | overrides))
    model = AutoModelForCausalLM.from_config(config)
    _randomise(model, 0.0 if family in ("gemma", "gemma3", *DELTA_RULE) else 1.0)
    model.save_pretrained(folder)
    return folder


def _write_llama(folder: Path, config: dict[str, Any]) -> None:
    """Write what transformers would write of a Llama without biases."""
    if config.get("attention_bias") or config.get("mlp_bias"):
        pytest.skip("needs torch")
    hidden, vocab, ffn = (config[f"{n}_size"] for n in ("hidden", "vocab", "intermediate"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["head_dim"]
    of_layer = {
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (kv_heads * width, hidden),
        "self_attn.v_proj": (kv_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes["model.norm"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, hidden)
    normal = np.random.default_rng(0).standard_normal
    weights = {}
    for name, shape in shapes.items():
        noise = normal(shape, np.float32)
        scaled = noise * 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 1.0 + noise * 0.3
        weights[f"{name}.weight"] = scaled.astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    fields = {"model_type": "llama", "hidden_act": "silu", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(fields | config))


def reference_model(folder: Path, context: int) -> "torch.nn.Module":
    """transformers' model of a checkpoint, with eager attention.

    Args:
        context: the checkpoint's context as midfill states it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    rotary = model.model.rotary_emb
    if rotary is not None and rotary.rope_type == "dynamic":
        # transformers grows theta with the longest sequence seen. midfill has it fixed at the
        # whole context's, so the reference is brought there and kept from going back.
        with torch.inference_mode():
            model(torch.zeros((1, context), dtype=torch.int64), use_cache=False)
        rotary.original_max_seq_len = 0
    if (
        rotary is not None and rotary.rope_type == "longrope"
    ):  # the same with its frequencies of long texts
        with torch.inference_mode():
            model(torch.zeros((1, context), dtype=torch.int64), use_cache=False)
        rotary.rope_type = "default"
    return model


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of ``VOCAB`` tokens: SPECIAL_TOKENS from id 0, the bytes, a few merges."""
    merges = [(first, second) for first, _, second in (m.partition("+") for m in _MERGES.split())]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges)]
    assert len(set(tokens)) == VOCAB
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _randomise(model: "torch.nn.Module", norms: float) -> None:
    """Give every parameter values that matter; the layers keep activations near unit size.

    Norm weights are about ``norms``.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("linear_attn.A_log"):  # states that last for some tokens
                parameter.copy_(noise - 2.0)
            elif name.endswith("linear_attn.norm.weight"):
                parameter.copy_(1.0 + noise * 0.3)
            elif parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(norms + noise * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
