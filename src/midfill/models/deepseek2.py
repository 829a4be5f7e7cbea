"""DeepSeek-V2: latent attention and fine-grained experts (DeepSeek-Coder-V2-Lite, DeepSeek-V2).

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
2024, arXiv 2405.04434. Names and defaults of fields are those of transformers.
"""

import math
from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import Experts, LatentAttention, ModelConfig, RopeScaling
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes

MODULES = {
    **LLAMA_MODULES,
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "router": "mlp.gate",
    **{f"experts.{part}": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_MAX_DENSE_LAYERS = 10_000
_MAX_GROUPS = 63
_SOFTMAX, _SIGMOID = 1, 2
"""GGUF's numbers of scoring functions."""
_METHODS = ("greedy", "group_limited_greedy")


def read_latent_decoder(fields: ConfigFields, family: str) -> ModelConfig:
    """Read what DeepSeek-V2 and V3 state alike, all but their experts.

    Raises:
        CheckpointError: a field is missing, malformed or asks for something unsupported.
    """
    for flag in ("attention_bias", "mlp_bias"):
        if fields.flag(flag, False):
            raise fields.error(f"{flag!r} is not supported with latent attention")
    config = huggingface_config.read_decoder(fields, family)
    # null means that queries have no latent; a missing key means transformers' default.
    query_rank = 0 if fields.states("q_lora_rank") else 1536
    latent = LatentAttention(
        query_rank=max(fields.integer("q_lora_rank", query_rank), 0),
        rank=fields.size("kv_lora_rank", 512),
        plain_dim=fields.size("qk_nope_head_dim", 128),
        rotary_dim=fields.size("qk_rope_head_dim", 64),
        value_dim=fields.size("v_head_dim", 128),
    )
    if latent.rotary_dim % 2 or latent.rank % 2:
        raise fields.error(
            f"'qk_rope_head_dim' and 'kv_lora_rank' must be even, not {latent.rotary_dim} and "
            f"{latent.rank}"
        )
    return with_latent(config, latent)


def with_latent(config: ModelConfig, latent: LatentAttention) -> ModelConfig:
    """Return the configuration with latent attention."""
    return replace(
        config,
        kv_heads=1,
        head_dim=latent.key_dim,
        attention_scale=latent.query_dim**-0.5 * _score_factor(config.rope_scaling),
        latent=latent,
    )


def _score_factor(scaling: RopeScaling) -> float:
    """Return the factor of scores by which these models sharpen attention over a scaled context."""
    if scaling.kind != "yarn" or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def read_routed_experts(fields: ConfigFields, layers: int) -> Experts | None:
    """Read the experts that V2 and V3 state alike; None if no layer has any."""
    if fields.size("moe_layer_freq", 1) != 1:
        raise fields.error("'moe_layer_freq' must be 1, which is every layer after the dense ones")
    count = fields.integer("n_routed_experts", 0)
    dense = min(fields.integer("first_k_dense_replace", 0), layers)
    if count <= 0 or dense == layers:
        return None
    if dense > _MAX_DENSE_LAYERS:
        raise fields.error(f"'first_k_dense_replace' must be at most {_MAX_DENSE_LAYERS}")
    ffn = fields.size("moe_intermediate_size")
    return Experts(
        count=count,
        per_token=fields.size("num_experts_per_tok"),
        ffn=ffn,
        normalised=False,
        shared_ffn=ffn * fields.integer("n_shared_experts", 0),
        shared_gated=False,
        dense_layers=tuple(range(dense)),
        weight_factor=fields.number("routed_scaling_factor", 1.0),
    )


def read_groups(
    fields: ConfigFields,
    experts: Experts,
    groups_key: str = "n_group",
    chosen_key: str = "topk_group",
) -> Experts:
    """Return the experts in the groups that a file states."""
    groups, chosen = fields.size(groups_key, 1), fields.size(chosen_key, 1)
    if groups > _MAX_GROUPS:
        raise fields.error(f"{groups_key!r} must be at most {_MAX_GROUPS}, not {groups}")
    if experts.count % groups or chosen > groups:
        raise fields.error(
            f"{experts.count} experts can't be divided into {groups} groups of which a token is "
            f"sent to {chosen}"
        )
    if chosen * (experts.count // groups) < experts.per_token:
        raise fields.error(f"{chosen} groups don't hold the {experts.per_token} experts of a token")
    return replace(experts, groups=groups, groups_per_token=chosen)


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = read_latent_decoder(fields, "deepseek2")
    experts = read_routed_experts(fields, config.layers)
    if experts is None:
        return config
    if fields.flag("norm_topk_prob", False):
        # DeepSeek's code and transformers disagree on what it does, and no released model has it.
        raise fields.error("'norm_topk_prob' is not supported with model type deepseek_v2")
    if fields.text("scoring_func", "softmax") != "softmax":
        raise fields.error(f"'scoring_func' must be 'softmax', not {fields.get('scoring_func')!r}")
    method = fields.text("topk_method", "greedy")
    if method not in _METHODS:
        raise fields.error(f"'topk_method' must be {' or '.join(_METHODS)}, not {method!r}")
    if method != "greedy":
        experts = read_groups(fields, experts)
    return replace(config, experts=experts)


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    """Read what llama.cpp's converter writes, of V3 as well as of V2."""
    rotary = fields.size("rope.dimension_count")
    keys, values = (
        fields.size(f"attention.{part}_length_mla", fields.size(f"attention.{part}_length"))
        for part in ("key", "value")
    )
    latent = LatentAttention(
        query_rank=fields.integer("attention.q_lora_rank", 0),
        rank=fields.size("attention.kv_lora_rank"),
        plain_dim=keys - rotary,
        rotary_dim=rotary,
        value_dim=values,
        stored_apart="layers.0.kv_b.weight" not in shapes,
    )
    if latent.rank % 2 or rotary % 2 or latent.plain_dim <= 0:
        raise fields.error(
            f"a latent of {latent.rank} numbers beside keys of {keys}, {rotary} of them rotated, "
            "is not supported"
        )
    has_experts = fields.integer("expert_count", 0) > 0
    experts = _gguf_experts(fields, shapes) if has_experts else None
    config = gguf_config.read_decoder(
        fields, shapes, "deepseek2", experts=experts, head_dim=latent.key_dim
    )
    scaling = _gguf_scaling(fields, config.rope_scaling)
    return with_latent(replace(config, rope_scaling=scaling), latent)


def _gguf_experts(fields: ConfigFields, shapes: Shapes) -> Experts:
    scoring = fields.integer("expert_gating_func", _SOFTMAX)
    if scoring not in (_SOFTMAX, _SIGMOID):
        raise fields.error(f"'expert_gating_func' must be 1 or 2, not {scoring}")
    experts = replace(
        gguf_config.read_experts(fields, shapes, normalised=False),
        shared_gated=False,
        scoring="sigmoid" if scoring == _SIGMOID else "softmax",
        corrected=any(name.endswith("e_score_correction_bias") for name in shapes),
        weight_factor=fields.number("expert_weights_scale", 1.0),
    )
    return read_groups(fields, experts, "expert_group_count", "expert_group_used_count")


def _gguf_scaling(fields: ConfigFields, scaling: RopeScaling) -> RopeScaling:
    """Return the scaling with YaRN's factors as llama.cpp understands them in these files.

    They state a tenth of ``mscale_all_dim``, and rotated numbers have no factor: ``mscale`` is the
    same in all models.
    """
    if scaling.kind != "yarn":
        return scaling
    weight = 10.0 * fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not weight:
        return replace(scaling, attention_factor=1.0)
    return replace(scaling, attention_factor=None, mscale=weight, mscale_all_dim=weight)


FAMILY = Family(
    name="deepseek2",
    model_type="deepseek_v2",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
    from_gguf=_from_gguf,
)
