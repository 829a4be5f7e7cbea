"""Qwen2, Qwen2.5 and Qwen2.5-Coder: biases on q, k and v; upper layers may have a window."""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = huggingface_config.read_decoder(fields, "qwen2")
    window, windowed = huggingface_config.read_layer_windows(fields, config.layers)
    return replace(config, qkv_bias=True, sliding_window=window, windowed_layers=windowed)


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    return gguf_config.read_decoder(fields, shapes, "qwen2")


FAMILY = Family(
    name="qwen2",
    from_huggingface=_from_huggingface,
    huggingface_modules=LLAMA_MODULES,
    from_gguf=_from_gguf,
)
