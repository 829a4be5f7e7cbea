"""Gemma and CodeGemma: Llama with GELU, scaled embeddings, and norms that multiply by 1 + weight.

Gemma Team, "Gemma: Open Models Based on Gemini Research and Technology", 2024, arXiv 2403.08295.
CodeGemma Team, "CodeGemma: Open Code Models Based on Gemma", 2024, arXiv 2406.11409.
"""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("attention in both directions is not supported")
    config = huggingface_config.read_decoder(
        fields, "gemma", activation="gelu_pytorch_tanh", tied_embeddings=True
    )
    attention_bias = fields.flag("attention_bias", False)
    config = replace(
        config,
        head_dim=fields.size("head_dim", 256),  # doesn't follow from the hidden size
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
    return _gemma(config)


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    return _gemma(gguf_config.read_decoder(fields, shapes, "gemma"))


def _gemma(config: ModelConfig) -> ModelConfig:
    """Return a configuration with what is the same in all files.

    The first files say "gelu" for the approximation with tanh that the models were trained with.
    """
    return replace(config, activation="gelu_tanh", embedding_multiplier=config.hidden**0.5)


FAMILY = Family(
    name="gemma",
    from_huggingface=_from_huggingface,
    huggingface_modules=LLAMA_MODULES,
    from_gguf=_from_gguf,
    norm_offset=1.0,
)
