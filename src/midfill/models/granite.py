"""Granite: Llama with four scalars, on embeddings, residual branches, scores and logits."""

from dataclasses import replace
from typing import TypedDict

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes


class Scalars(TypedDict):
    """Fields of ``ModelConfig``."""

    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    attention_scale: float | None


def huggingface_scalars(fields: ConfigFields) -> Scalars:
    """Read the four scalars of a config.json.

    Raises:
        CheckpointError: one is malformed, or the logits' divisor 0.
    """
    return Scalars(
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=_divisor(fields, "logits_scaling"),
        attention_scale=fields.number("attention_multiplier", 1.0),
    )


def gguf_scalars(fields: ConfigFields) -> Scalars:
    """Read the four scalars of a GGUF file; raises what ``huggingface_scalars`` does.

    Those that are not set are left out. Scores then get the usual factor head_dim ** -0.5.
    """
    return Scalars(
        embedding_multiplier=fields.number("embedding_scale", 1.0),
        residual_multiplier=fields.number("residual_scale", 1.0),
        logits_divisor=_divisor(fields, "logit_scale"),
        attention_scale=fields.optional_number("attention.scale"),
    )


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", False)
    return replace(
        huggingface_config.read_decoder(fields, "granite"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        **huggingface_scalars(fields),
    )


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    return replace(gguf_config.read_decoder(fields, shapes, "granite"), **gguf_scalars(fields))


def _divisor(fields: ConfigFields, key: str) -> float:
    value = fields.number(key, 1.0)
    if value == 0:
        raise fields.error(f"{key!r} divides the logits and must not be 0")
    return value


FAMILY = Family(
    name="granite",
    from_huggingface=_from_huggingface,
    huggingface_modules=LLAMA_MODULES,
    from_gguf=_from_gguf,
    gguf_interleaved_rotary=True,
)
