"""Family: how the descriptions of one model family are read and its tensors are named."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from midfill.models.config import ModelConfig
from midfill.models.config_fields import ConfigFields

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """One model family. Each has a file of its own and is listed in ``families``.

    Attributes:
        name: the family's name, in a Hugging Face config.json and in GGUF.
        from_huggingface: reads a config.json.
        model_type: its name in a config.json, if that is another.
        norm_offset: what is added to the norm weights of Hugging Face files.
        huggingface_modules: canonical module name without "layers.{i}." -> Hugging Face's name
            without "model.layers.{i}.".
        from_gguf: reads GGUF metadata (keys below "{name}.") and the shapes by canonical name;
            None if GGUF has no architecture of this name.
        gguf_interleaved_rotary: whether GGUF files store the rows of q and k (weights and biases)
            with the two rotary halves interleaved (GGML's NORM order) instead of consecutive (NEOX
            order).
    """

    name: str
    from_huggingface: Callable[[ConfigFields], ModelConfig]
    huggingface_modules: Mapping[str, str]
    from_gguf: Callable[[ConfigFields, Shapes], ModelConfig] | None = None
    gguf_interleaved_rotary: bool = False
    model_type: str = ""
    norm_offset: float = 0.0


LLAMA_MODULES: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
"""Llama's module names in transformers; most families share them."""
