"""Qwen2 with mixtures of experts and an expert that all tokens share (Qwen1.5-MoE, Qwen2-57B-A14B).

Qwen Team, "Qwen2 Technical Report", 2024, arXiv 2407.10671, section 2.2.2.
"""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import EXPERT_MODULES, ConfigFields, Family, Shapes


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = huggingface_config.read_decoder(fields, "qwen2moe")
    if fields.flag("use_sliding_window", False) and not fields.texts("layer_types"):
        raise fields.error("'use_sliding_window' needs 'layer_types', which name the layers")
    window, windowed = huggingface_config.read_layer_windows(fields, config.layers)
    shared_ffn = fields.size("shared_expert_intermediate_size", 5632)
    return replace(
        config,
        qkv_bias=fields.flag("qkv_bias", True),
        sliding_window=window,
        windowed_layers=windowed,
        experts=huggingface_config.read_experts(
            fields, config.layers, per_token=4, shared_ffn=shared_ffn
        ),
    )


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    experts = gguf_config.read_experts(fields, shapes, normalised=False)
    return gguf_config.read_decoder(fields, shapes, "qwen2moe", experts=experts)


FAMILY = Family(
    name="qwen2moe",
    model_type="qwen2_moe",
    from_huggingface=_from_huggingface,
    huggingface_modules=EXPERT_MODULES,
    from_gguf=_from_gguf,
)
