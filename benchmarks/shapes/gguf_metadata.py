"""What GGUF files say of a model's shape, key by key, as llama.cpp's converter writes it."""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import gguf

from benchmarks.shapes.shape import Shape
from midfill.models.altup import STREAMS, AltUp
from midfill.models.config import DeltaRule, Experts, LatentAttention, StateSpace

_YARN_FACTOR = 32
"""How much longer gpt-oss's context is than that of its first training."""
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""The first layers of a Gemma 3n, and the share of an MLP's gates that don't count there."""


def add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Write what a file says of a model's shape."""
    # OpenVINO reads no file without it.
    writer.add_file_type(_file_type(shape))
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.query_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocab)
    if not isinstance(shape.states, StateSpace):
        writer.add_head_count_kv(shape.kv_heads)
    if shape.experts is not None:
        _add_experts(writer, shape, shape.experts)
    if shape.latent is not None:
        _add_latent(writer, shape.latent)
    elif shape.architecture in _OWN_KEYS or shape.experts is not None:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    else:
        writer.add_rope_dimension_count(shape.head_dim)
    if shape.architecture in _OWN_KEYS:
        _OWN_KEYS[shape.architecture](writer, shape)


def _file_type(shape: Shape) -> gguf.LlamaFileType:
    """Return GGUF's name of what most weights are stored as."""
    if shape.architecture == "gpt-oss":
        return gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    if shape.k_quants:
        return gguf.LlamaFileType.MOSTLY_Q4_K_M
    return gguf.LlamaFileType.MOSTLY_Q4_0


def _add_experts(writer: gguf.GGUFWriter, shape: Shape, experts: Experts) -> None:
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.ffn)
    if shape.latent is not None:
        writer.add_expert_shared_count(experts.shared_ffn // experts.ffn)
        writer.add_leading_dense_block_count(len(experts.dense_layers))
        writer.add_expert_weights_scale(experts.weight_factor)
    elif experts.shared_ffn:
        writer.add_expert_shared_feed_forward_length(experts.shared_ffn)


def _add_latent(writer: gguf.GGUFWriter, latent: LatentAttention) -> None:
    writer.add_rope_dimension_count(latent.rotary_dim)
    writer.add_kv_lora_rank(latent.rank)
    writer.add_key_length(latent.key_dim)
    writer.add_value_length(latent.rank)
    writer.add_key_length_mla(latent.query_dim)
    writer.add_value_length_mla(latent.value_dim)


def _add_gpt_oss(writer: gguf.GGUFWriter, shape: Shape) -> None:
    assert shape.window is not None
    writer.add_sliding_window(shape.window)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(_YARN_FACTOR)
    writer.add_rope_scaling_orig_ctx_len(shape.context // _YARN_FACTOR)


def _add_granite_hybrid(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Write what a file says of a Granite 4.0-H's states, and its four scalars."""
    space, attention = shape.states, shape.attention_layers
    assert isinstance(space, StateSpace)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_head_count_kv([shape.kv_heads * (i in attention) for i in range(shape.layers)])
    writer.add_rope_scaling_finetuned(False)  # queries and keys aren't rotated
    writer.add_attention_scale(1 / shape.head_dim)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_logit_scale(8.0)
    _add_states(writer, space, groups=1)


def _add_qwen3_next(writer: gguf.GGUFWriter, shape: Shape) -> None:
    rule = shape.states
    assert isinstance(rule, DeltaRule)
    writer.add_rope_dimension_count(shape.head_dim // 4)
    writer.add_full_attention_interval(4)
    _add_states(writer, rule, groups=rule.key_heads)


def _add_states(writer: gguf.GGUFWriter, states: StateSpace | DeltaRule, groups: int) -> None:
    writer.add_ssm_conv_kernel(states.conv_width)
    writer.add_ssm_state_size(states.state_dim)
    writer.add_ssm_inner_size(states.inner)
    writer.add_ssm_time_step_rank(states.heads)
    writer.add_ssm_group_count(groups)


def _add_gemma3n(writer: gguf.GGUFWriter, shape: Shape) -> None:
    altup, layers = shape.altup, range(shape.layers)
    assert isinstance(altup, AltUp)
    assert shape.window is not None
    cutoff = NormalDist().inv_cdf(_SPARSITY)
    writer.add_sliding_window(shape.window)
    writer.add_sliding_window_pattern([(layer + 1) % 5 != 0 for layer in layers])
    writer.add_final_logit_softcapping(30.0)
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(STREAMS)
    writer.add_embedding_length_per_layer_input(altup.layer_width)
    writer.add_shared_kv_layers(shape.kv_sharing_layers)
    writer.add_activation_sparsity_scale(
        [cutoff if layer < _SPARSE_LAYERS else -math.inf for layer in layers]
    )


_OWN_KEYS: Mapping[str, Callable[[gguf.GGUFWriter, Shape], None]] = {
    "gpt-oss": _add_gpt_oss,
    "granitehybrid": _add_granite_hybrid,
    "qwen3next": _add_qwen3_next,
    "gemma3n": _add_gemma3n,
}
"""Architecture -> writes the keys that it alone has."""
