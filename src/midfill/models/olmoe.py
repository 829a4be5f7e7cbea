"""OLMoE (OLMoE-1B-7B): mixtures of experts; all heads of a query normed together, and of a key.

Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", 2024, arXiv 2409.02060. The
probabilities of a token's experts aren't normalised.
"""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import EXPERT_MODULES, ConfigFields, Family, Shapes


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    if fields.get("clip_qkv") is not None:
        raise fields.error("'clip_qkv' is not supported")
    config = huggingface_config.read_decoder(fields, "olmoe", epsilon=1e-5)
    attention_bias = fields.flag("attention_bias", False)
    return replace(
        config,
        joint_qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        experts=huggingface_config.read_experts(
            fields, config.layers, per_token=8, ffn_key="intermediate_size"
        ),
    )


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    if fields.number("attention.clamp_kqv", 0.0):
        raise fields.error("'attention.clamp_kqv' is not supported")
    experts = gguf_config.read_experts(fields, shapes, normalised=False)
    # Unlike in other families' files, the one size that is stated is that of each expert.
    experts = replace(
        experts,
        ffn=fields.size("expert_feed_forward_length", fields.size("feed_forward_length")),
    )
    config = gguf_config.read_decoder(fields, shapes, "olmoe", experts=experts)
    return replace(config, joint_qk_norm=True)


FAMILY = Family(
    name="olmoe",
    from_huggingface=_from_huggingface,
    huggingface_modules=EXPERT_MODULES,
    from_gguf=_from_gguf,
)
