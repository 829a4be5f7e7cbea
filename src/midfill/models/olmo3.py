"""Olmo 3: OLMo 2, three of four of whose layers see a sliding window.

Team Olmo, "Olmo 3", 2025, arXiv 2512.13961. Long contexts are YaRN's, in layers that see
everything; the others have the plain rotary embedding. GGUF files call it olmo2.
"""

from dataclasses import replace

from midfill.models import huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import ConfigFields, Family
from midfill.models.olmo2 import MODULES, WINDOW_PATTERN, read_decoder

_THETA = 500_000.0


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = read_decoder(fields, "olmo3")
    windowed = huggingface_config.read_windowed_layers(fields, config.layers)
    if windowed is None:
        windowed = tuple(i for i in range(config.layers) if (i + 1) % WINDOW_PATTERN)
    theta = _theta(fields, huggingface_config.FULL)
    # Without the key, transformers assumes a window of 4096; null is none.
    has_none = fields.states("sliding_window") and fields.get("sliding_window") is None
    if not windowed or has_none:
        return replace(config, rope_theta=theta)
    return replace(
        config,
        rope_theta=theta,
        local_rope_theta=_theta(fields, huggingface_config.SLIDING),
        sliding_window=fields.size("sliding_window", 4096),
        windowed_layers=None if len(windowed) == config.layers else windowed,
    )


def _theta(fields: ConfigFields, layer_type: str) -> float:
    """Return a kind of layers' base of the rotary embedding.

    Raises:
        CheckpointError: layers with a window have scaling, or a number is malformed.
    """
    plain = fields.number("rope_theta", _THETA)
    table = fields.table("rope_parameters").get(layer_type)
    if not isinstance(table, dict):
        flat = ConfigFields(fields.table("rope_parameters"), f"{fields.source}: rope parameters")
        return flat.number("rope_theta", plain)
    rope = ConfigFields(table, f"{fields.source}: rope parameters")
    if layer_type == huggingface_config.SLIDING and rope.text("rope_type", "default") != "default":
        raise fields.error("RoPE scaling of layers with a sliding window is not supported")
    return rope.number("rope_theta", plain)


FAMILY = Family(
    name="olmo3",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
)
