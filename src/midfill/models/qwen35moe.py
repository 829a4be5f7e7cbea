"""Qwen3.5's text models with mixtures of experts (35B-A3B and larger): Qwen3-Next's layers.

See ``qwen35``; the architecture is "qwen35moe" of gguf-py.
"""

from dataclasses import replace

from midfill.models import gguf_config
from midfill.models.config import ModelConfig
from midfill.models.family import ConfigFields, Family, Shapes
from midfill.models.qwen3next import (
    GGUF_MODULES,
    MODULES,
    read_gguf,
    read_huggingface,
    read_huggingface_experts,
)


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = read_huggingface(fields, "qwen35moe", ffn_key="moe_intermediate_size")
    experts = read_huggingface_experts(fields, config.layers, per_token=8)
    return replace(config, experts=experts)


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    experts = gguf_config.read_experts(fields, shapes, normalised=True)
    return read_gguf(fields, shapes, "qwen35moe", experts, tiled=True)


FAMILY = Family(
    name="qwen35moe",
    model_type="qwen3_5_moe_text",
    multimodal_type="qwen3_5_moe",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
    from_gguf=_from_gguf,
    norm_offset=1.0,
    gguf_modules=GGUF_MODULES,
    skips_predictors=True,
)
