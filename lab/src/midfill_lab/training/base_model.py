"""The base model as a transformers model, from any checkpoint that midfill opens.

Its attention is over packed rows: every example by itself, so nothing is computed across examples.
It is registered with transformers as ``PACKED_ATTENTION``. The bounds of the examples are passed as
``cu_seq_lens_q`` and ``max_length_q``, as in transformers' own packed attention.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from midfill.errors import MidfillError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.config import ModelConfig
from midfill.models.families import FAMILIES, huggingface_names
from midfill.runners.rope import rope_frequencies

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
_EPSILON = {"starcoder2": "norm_epsilon"}


def load_base_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Load a checkpoint into a transformers model with attention over packed rows.

    Args:
        checkpoint: GGUF or Hugging Face; quantised weights are dequantised.
        dtype: of the weights.

    Raises:
        CheckpointError: a tensor is missing or broken.
        MidfillError: transformers has no setting for the model's RoPE scaling.
    """
    from transformers import AutoModelForCausalLM

    config = transformers_config(checkpoint.config)
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(config, attn_implementation=PACKED_ATTENTION)
    names = huggingface_names(checkpoint.config)
    weights = {
        names[name]: torch.from_numpy(np.array(checkpoint.tensor(name).to_float32())).to(dtype)
        for name in checkpoint.names()
    }
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    _set_rope_frequencies(model, checkpoint.config)
    return model


def transformers_config(config: ModelConfig) -> Any:
    """Return the transformers configuration of an architecture.

    Raises:
        MidfillError: config.json has no setting for the model's RoPE scaling, or models of its
            family can't be trained.
    """
    from transformers import AutoConfig

    family = FAMILIES[config.family]
    is_stored_otherwise = family.norm_offset or family.fused_projections
    has_other_layers = (
        config.experts or config.latent or config.state_space or config.local_rope_theta
    )
    if is_stored_otherwise or has_other_layers:
        raise MidfillError(f"models of the family {config.family} can't be trained here yet")
    fields: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "hidden_act": _ACTIVATIONS[config.activation],
        _EPSILON.get(config.family, "rms_norm_eps"): config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": None,
        "rope_theta": config.rope_theta,
    }
    if config.rope_scaling.kind != "none":
        fields["rope_scaling"] = _rope_scaling(config)
    if config.rope_scaling.kind == "dynamic":
        fields["max_position_embeddings"] = config.rope_scaling.original_context
    if config.family == "granite":
        fields |= {
            "embedding_multiplier": config.embedding_multiplier,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": config.logits_divisor,
            "attention_multiplier": config.score_scale,
        }
    if config.family in ("llama", "granite", "olmo2"):
        fields |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if config.family == "starcoder2":
        fields |= {"use_bias": config.qkv_bias}
    if config.sliding_window is not None:
        fields |= {"sliding_window": config.sliding_window, "use_sliding_window": True}
        if config.windowed_layers is not None:
            fields["layer_types"] = [
                "sliding_attention" if layer in config.windowed_layers else "full_attention"
                for layer in range(config.layers)
            ]
    return AutoConfig.for_model(config.family, **fields)


def _rope_scaling(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling.kind == "factors":
        raise MidfillError(
            "this GGUF file scales RoPE by a table, for which transformers has no setting; train "
            "from the model's Hugging Face folder"
        )
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("yarn", "llama3"):
        fields["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        fields |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        fields |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
            "truncate": scaling.truncate,
        }
    return fields


def _set_rope_frequencies(model: nn.Module, config: ModelConfig) -> None:
    """Set the RoPE frequencies that midfill serves with; no checkpoint stores them.

    They are constant. With dynamic scaling, transformers' own would depend on the row's length.
    """
    numbers, factor = rope_frequencies(config)
    frequencies = torch.from_numpy(numbers)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.register_buffer("inv_freq", frequencies, persistent=False)
            module.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)
            # nn.Module is typed as if all attributes were tensors or modules.
            module.attention_scaling = factor  # type: ignore[assignment]
            module.rope_type = "default"  # type: ignore[assignment]


PACKED_ATTENTION = "midfill_packed"


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each example.

    On a GPU, one kernel computes all examples of a row (FlashAttention); it has no float32.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim].
        attention_mask: always None.
        cu_seq_lens_q: int32 [examples + 1], where each example starts, and the row's length.
        max_length_q: tokens of the longest example, or more.
        scaling: factor of the scores; None is head_dim ** -0.5.
        sliding_window: maximum number of keys per query, its own included; None is unlimited.

    Returns:
        [1, tokens, heads, head_dim], and None for the attention weights.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        bounds, longest = cu_seq_lens_q, max_length_q
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
        mixed: Any = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=window
        )
        return mixed[None], None
    lengths = [stop - start for start, stop in pairwise(cu_seq_lens_q.tolist())]
    queries, keys, values = (torch.split(each, lengths, dim=2) for each in (query, key, value))
    parts = [
        _attend(*example, scale, sliding_window)
        for example in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Compute causal attention over one example; tensors are [1, heads, tokens, head_dim]."""
    tokens = query.shape[2]
    windowed = window is not None and tokens > window
    if not windowed and (query.device.type != "cpu" or query.dtype != torch.bfloat16):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    at = torch.arange(tokens, device=query.device)
    distance = at[:, None] - at
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    # In bfloat16 on a CPU, two matrix products are faster than the fused kernel's backward pass.
    scores = (query @ key.transpose(-1, -2)) * scale
    scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: examples are separated by their bounds."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
