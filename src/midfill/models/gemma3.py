"""Gemma 3's text models: most layers see a sliding window, with a rotary embedding of their own.

Gemma Team, "Gemma 3 Technical Report", 2025, arXiv 2503.19786. Every sixth layer sees everything.
Norms multiply by 1 + weight; what attention and the MLP add is normed again. Embeddings are scaled
by the square root of the hidden size.
"""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes

_PATTERN = 6
_LOCAL_THETA = 10_000.0
_LAYERS_27B = 62

MODULES = {
    **LLAMA_MODULES,
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.optional_number(name):
            raise fields.error(f"{name!r} is not supported")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("attention in both directions is not supported")
    activation = fields.text("hidden_activation", "gelu_pytorch_tanh")
    config = huggingface_config.read_decoder(
        fields,
        "gemma3",
        activation=activation,
        tied_embeddings=True,
        layer_type=huggingface_config.FULL,
    )
    attention_bias = fields.flag("attention_bias", False)
    config = replace(
        config,
        rope_theta=read_global_theta(fields, config),
        # transformers' defaults, which don't follow from the hidden size.
        head_dim=fields.size("head_dim", 256),
        kv_heads=fields.size("num_key_value_heads", 4),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        local_rope_theta=read_local_theta(fields),
    )
    window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
    return _gemma(config, window, _windowed_layers(fields, config.layers))


def read_global_theta(fields: ConfigFields, config: ModelConfig) -> float:
    """Return theta where everything is seen; transformers assumes another one than elsewhere."""
    stated = fields.get("rope_theta") is not None or fields.get("rope_parameters") is not None
    return config.rope_theta if stated else 1_000_000.0


def read_local_theta(fields: ConfigFields) -> float:
    table = fields.table("rope_parameters").get(huggingface_config.SLIDING)
    if not isinstance(table, dict):
        return fields.number("rope_local_base_freq", _LOCAL_THETA)
    rope = ConfigFields(table, f"{fields.source}: rope parameters")
    if rope.text("rope_type", "default") != "default":
        raise fields.error("RoPE scaling of layers with a sliding window is not supported")
    return rope.number("rope_theta", _LOCAL_THETA)


def _windowed_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    windowed = huggingface_config.read_windowed_layers(fields, layers)
    if windowed is not None:
        return windowed
    pattern = fields.size(
        "sliding_window_pattern", fields.size("_sliding_window_pattern", _PATTERN)
    )
    return tuple(layer for layer in range(layers) if (layer + 1) % pattern)


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    if fields.number("final_logit_softcapping", 0.0):
        raise fields.error("'final_logit_softcapping' is not supported")
    config = gguf_config.read_decoder(fields, shapes, "gemma3", full_every=_PATTERN)
    # Files rarely state the scale; the largest model's doesn't follow from its heads' size.
    scale = fields.optional_number("attention.scale")
    if scale is None and config.layers == _LAYERS_27B:
        scale = (config.hidden / config.query_heads) ** -0.5
    config = replace(
        config,
        activation="gelu_tanh",
        rope_theta=fields.number("rope.freq_base", 1_000_000.0),
        attention_scale=scale,
        local_rope_theta=fields.number("rope.freq_base_swa", _LOCAL_THETA),
    )
    return _gemma(config, config.sliding_window, config.windowed_layers)


def _gemma(
    config: ModelConfig, window: int | None, windowed: tuple[int, ...] | None
) -> ModelConfig:
    """Return a configuration with what is the same in all files."""
    return replace(
        config,
        qk_norm=True,
        post_norms=True,
        embedding_multiplier=config.hidden**0.5,
        sliding_window=window if windowed is None or windowed else None,
        windowed_layers=windowed or None,
    )


FAMILY = Family(
    name="gemma3",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
    from_gguf=_from_gguf,
    model_type="gemma3_text",
    norm_offset=1.0,
)
