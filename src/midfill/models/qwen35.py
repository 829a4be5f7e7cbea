"""Qwen3.5's text models (0.8B to 27B): Qwen3-Next's layers with dense MLPs.

Names and defaults of fields are those of transformers' Qwen3_5; those of GGUF are what llama.cpp's
converter writes (the architecture "qwen35" of gguf-py), which puts the heads of values in another
order (``DeltaRule.tiled``). Of a model that sees images, too, the part that reads text is run.
"""

from midfill.models.config import ModelConfig
from midfill.models.family import ConfigFields, Family, Shapes
from midfill.models.qwen3next import GGUF_MODULES, MODULES, read_gguf, read_huggingface


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    return read_huggingface(fields, "qwen35", ffn_key="intermediate_size")


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    return read_gguf(fields, shapes, "qwen35", None, tiled=True)


FAMILY = Family(
    name="qwen35",
    model_type="qwen3_5_text",
    multimodal_type="qwen3_5",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
    from_gguf=_from_gguf,
    norm_offset=1.0,
    gguf_modules=GGUF_MODULES,
    skips_predictors=True,
)
