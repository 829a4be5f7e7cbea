"""Qwen3: each query and key head is normalised before the rotary embedding."""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = huggingface_config.read_decoder(fields, "qwen3")
    window, windowed = huggingface_config.read_layer_windows(fields, config.layers)
    attention_bias = fields.flag("attention_bias", False)
    return replace(
        config,
        # transformers' default does not follow from the hidden size here.
        head_dim=fields.size("head_dim", 128),
        qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_window=window,
        windowed_layers=windowed,
    )


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    return replace(gguf_config.read_decoder(fields, shapes, "qwen3"), qk_norm=True)


FAMILY = Family(
    name="qwen3",
    from_huggingface=_from_huggingface,
    huggingface_modules=LLAMA_MODULES,
    from_gguf=_from_gguf,
)
