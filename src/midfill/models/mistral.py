"""Mistral: Llama with a sliding window in all layers. (Its GGUF files use the name llama.)"""

from dataclasses import replace

from midfill.models import huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    # null means no window; if the key is missing, transformers assumes 4096.
    no_window = fields.states("sliding_window") and fields.get("sliding_window") is None
    window = None if no_window else fields.size("sliding_window", 4096)
    return replace(huggingface_config.read_decoder(fields, "mistral"), sliding_window=window)


FAMILY = Family(
    name="mistral",
    from_huggingface=_from_huggingface,
    huggingface_modules=LLAMA_MODULES,
)
