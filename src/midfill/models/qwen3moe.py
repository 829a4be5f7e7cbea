"""Qwen3 with mixtures of experts (Qwen3-30B-A3B, Qwen3-Coder-30B-A3B).

Qwen Team, "Qwen3 Technical Report", 2025, arXiv 2505.09388, section 2.
"""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import EXPERT_MODULES, ConfigFields, Family, Shapes


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = huggingface_config.read_decoder(fields, "qwen3moe")
    attention_bias = fields.flag("attention_bias", False)
    # Unlike in Qwen3, a window is that of every layer.
    window = fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None
    return replace(
        config,
        qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_window=fields.size("sliding_window") if window else None,
        experts=huggingface_config.read_experts(fields, config.layers, per_token=8),
    )


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    experts = gguf_config.read_experts(fields, shapes, normalised=True)
    config = gguf_config.read_decoder(fields, shapes, "qwen3moe", experts=experts)
    return replace(config, qk_norm=True)


FAMILY = Family(
    name="qwen3moe",
    model_type="qwen3_moe",
    from_huggingface=_from_huggingface,
    huggingface_modules=EXPERT_MODULES,
    from_gguf=_from_gguf,
)
