"""OLMo 2: norms after attention and the MLP, none before; all heads of a query normed together.

Team OLMo, "2 OLMo 2 Furious", 2025, arXiv 2501.00656, section 3.2. A GGUF file of this name may be
an Olmo 3, which has sliding windows besides (``olmo3``).
"""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes

WINDOW_PATTERN = 4
"""Of so many layers of an Olmo 3, the last one sees everything."""

_PRE_NORMS = ("attn_norm", "mlp_norm")
MODULES = {
    **{name: theirs for name, theirs in LLAMA_MODULES.items() if name not in _PRE_NORMS},
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def read_decoder(fields: ConfigFields, family: str) -> ModelConfig:
    """Read the part of a config.json that OLMo 2 and Olmo 3 write alike.

    Raises:
        CheckpointError: see ``huggingface_config.read_decoder``.
    """
    config = huggingface_config.read_decoder(
        fields, family, epsilon=1e-5, layer_type=huggingface_config.FULL
    )
    attention_bias = fields.flag("attention_bias", False)
    return _with_norms(replace(config, qkv_bias=attention_bias, output_bias=attention_bias))


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    return read_decoder(fields, "olmo2")


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    config = gguf_config.read_decoder(fields, shapes, "olmo2", full_every=WINDOW_PATTERN)
    if config.rope_scaling.kind == "yarn":
        # Files state the whole factor of Hugging Face's, which is YaRN's own in all of them.
        whole = fields.optional_number("rope.scaling.attn_factor")
        scaling = replace(config.rope_scaling, attention_factor=whole)
        config = replace(config, rope_scaling=scaling)
    if config.sliding_window is not None:
        local = fields.number("rope.freq_base_swa", config.rope_theta)
        config = replace(config, local_rope_theta=local)
    return _with_norms(config)


def _with_norms(config: ModelConfig) -> ModelConfig:
    return replace(config, joint_qk_norm=True, pre_norms=False, post_norms=True)


FAMILY = Family(
    name="olmo2",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
    from_gguf=_from_gguf,
)
