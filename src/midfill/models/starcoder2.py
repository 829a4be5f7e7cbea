"""StarCoder2: LayerNorm, biases everywhere, a plain GELU MLP and a sliding window."""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("use_bias", True)
    window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
    config = huggingface_config.read_decoder(
        fields,
        "starcoder2",
        activation="gelu_pytorch_tanh",
        epsilon_key="norm_epsilon",
        epsilon=1e-5,
        tied_embeddings=True,
    )
    return replace(
        config,
        norm="layer",
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        sliding_window=window,
    )


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    config = gguf_config.read_decoder(
        fields, shapes, "starcoder2", epsilon_key="attention.layer_norm_epsilon"
    )
    return replace(config, norm="layer", activation="gelu_tanh", gated_mlp=False)


FAMILY = Family(
    name="starcoder2",
    from_huggingface=_from_huggingface,
    huggingface_modules={**LLAMA_MODULES, "up": "mlp.c_fc", "down": "mlp.c_proj"},
    from_gguf=_from_gguf,
)
