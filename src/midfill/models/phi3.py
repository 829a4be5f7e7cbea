"""Phi-3 and Phi-4 (``Phi3ForCausalLM``): fused projections, heads of which a part is rotated.

Microsoft, "Phi-4-Mini Technical Report", 2025, arXiv 2503.01743, and "Phi-4 Technical Report",
2024, arXiv 2412.08905. Long contexts have frequencies of their own (LongRoPE, Ding et al., 2024,
arXiv 2402.13753). transformers uses them where a text is longer than the original context, so that
its first tokens have other keys then. Here they are used for all texts of a model whose context is
that long, as in vLLM: cached keys stay valid.
"""

import math
from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig, RopeScaling
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes

_LONG = ("longrope", "su", "yarn")
"""Names of LongRoPE in the files' order of age, the newest first."""


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    table = fields.table("rope_parameters") or fields.table("rope_scaling")
    rope = ConfigFields(table, f"{fields.source}: rope parameters")
    is_long = rope.text("rope_type", rope.text("type", "default")) in _LONG
    config = huggingface_config.read_decoder(
        fields, "phi3", epsilon=1e-5, reads_partial_rotary=True, ignores_scaling=is_long
    )
    window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
    config = replace(
        config,
        rotated=huggingface_config.read_rotated(fields, config.head_dim, 1.0),
        # A window as wide as the context shows everything.
        sliding_window=None if window is None or window >= config.context else window,
    )
    if not is_long:
        return config
    return replace(config, rope_scaling=_long_scaling(fields, rope, config))


def _long_scaling(fields: ConfigFields, rope: ConfigFields, config: ModelConfig) -> RopeScaling:
    """Return LongRoPE's divisors of frequencies, and its factor of queries and keys."""
    original = fields.size(
        "original_max_position_embeddings", rope.size("original_max_position_embeddings", 4096)
    )
    key = "long_factor" if config.context > original else "short_factor"
    factors = rope.numbers(key)
    if len(factors) != config.rotary_dim // 2 or min(factors) <= 0:
        raise fields.error(f"{key!r} must be {config.rotary_dim // 2} numbers above 0")
    stretch = config.context / original
    sharper = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return RopeScaling(
        kind="factors",
        frequency_factors=factors,
        attention_factor=rope.number("attention_factor", sharper),
    )


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    config = gguf_config.read_decoder(fields, shapes, "phi3", reads_partial_rotary=True)
    rotated = fields.size("rope.dimension_count", config.head_dim)
    window = config.sliding_window
    sharper = fields.optional_number("rope.scaling.attn_factor")
    return replace(
        config,
        rotated=None if rotated == config.head_dim else rotated,
        sliding_window=None if window is None or window >= config.context else window,
        rope_scaling=replace(config.rope_scaling, attention_factor=sharper),
    )


FAMILY = Family(
    name="phi3",
    from_huggingface=_from_huggingface,
    huggingface_modules=LLAMA_MODULES,
    from_gguf=_from_gguf,
    gguf_modules={"attn_qkv": "qkv", "ffn_up": "gate_up"},
    fused_projections=True,
)
