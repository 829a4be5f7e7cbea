"""Llama: SmolLM2, CodeLlama, DeepSeek-Coder, Granite Code and others of the same architecture."""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", False)
    return replace(
        huggingface_config.read_decoder(fields, "llama"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    return gguf_config.read_decoder(fields, shapes, "llama")


FAMILY = Family(
    name="llama",
    from_huggingface=_from_huggingface,
    huggingface_modules=LLAMA_MODULES,
    from_gguf=_from_gguf,
    gguf_interleaved_rotary=True,
)
