"""gpt-oss: mixtures of experts in MXFP4, attention sinks, every other layer with a sliding window.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, arXiv 2508.10925. Names and defaults of
fields are those of transformers.
"""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import Experts, ModelConfig, RopeScaling
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes

_ALPHA = 1.702
_THETA = 150_000.0
_SCALING = RopeScaling("yarn", factor=32.0, original_context=4096, truncate=False)
_LIMIT = 7.0
_PATTERN = 2
_MODULES = {
    **LLAMA_MODULES,
    "attn": "self_attn",
    "router": "mlp.router",
    **{f"experts.{part}": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
}


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = huggingface_config.read_decoder(fields, "gpt-oss", epsilon=1e-5, quantization="mxfp4")
    if fields.number("swiglu_alpha", _ALPHA) != _ALPHA:
        raise fields.error(f"'swiglu_alpha' must be {_ALPHA}, not {fields.get('swiglu_alpha')!r}")
    if not any(fields.states(key) for key in ("rope_parameters", "rope_scaling")):
        theta = fields.number("rope_theta", _THETA)
        config = replace(config, rope_theta=theta, rope_scaling=_SCALING)
    windowed = huggingface_config.read_windowed_layers(fields, config.layers)
    if windowed is None:
        windowed = tuple(layer for layer in range(config.layers) if (layer + 1) % _PATTERN)
    biased = fields.flag("attention_bias", True)
    experts = Experts(
        count=fields.size("num_local_experts", 128),
        per_token=fields.size("num_experts_per_tok", 4),
        ffn=config.ffn,
        normalised=True,
        router_bias=True,
    )
    config = replace(
        config,
        head_dim=fields.size("head_dim", 64),
        qkv_bias=biased,
        output_bias=biased,
        sliding_window=fields.size("sliding_window", 128) if windowed else None,
        windowed_layers=windowed or None,
    )
    return _gpt_oss(config, experts, fields.number("swiglu_limit", _LIMIT))


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    """Read the metadata; scores of those chosen are normalised, whatever files say of it.

    YaRN's ramp isn't rounded to whole dimensions, which GGUF doesn't state: llama.cpp rounds it.
    """
    stated = gguf_config.read_experts(fields, shapes, normalised=True)
    experts = replace(stated, normalised=True, router_bias="layers.0.router.bias" in shapes)
    config = gguf_config.read_decoder(
        fields, shapes, "gpt-oss", full_every=_PATTERN, experts=experts
    )
    scaling = replace(config.rope_scaling, truncate=False)
    return _gpt_oss(replace(config, rope_scaling=scaling), experts, _LIMIT)


def _gpt_oss(config: ModelConfig, experts: Experts, limit: float) -> ModelConfig:
    """Return a configuration with what is the same in all files."""
    return replace(
        config,
        activation="swiglu_oai",
        swiglu_limit=limit,
        mlp_bias=True,
        sinks=True,
        experts=experts,
    )


FAMILY = Family(
    name="gpt-oss",
    model_type="gpt_oss",
    from_huggingface=_from_huggingface,
    huggingface_modules=_MODULES,
    from_gguf=_from_gguf,
    gguf_modules={"post_attention_norm": "mlp_norm"},
    interleaved_experts=True,
)
