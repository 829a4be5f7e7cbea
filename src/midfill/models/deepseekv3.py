"""DeepSeek-V3: DeepSeek-V2's latent attention, experts chosen by corrected sigmoids (Moonlight).

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437, section 2.1. Layers that
predict further tokens (``num_nextn_predict_layers``) are not read.
"""

from dataclasses import replace

from midfill.models.config import ModelConfig
from midfill.models.deepseek2 import (
    MODULES,
    read_groups,
    read_latent_decoder,
    read_routed_experts,
)
from midfill.models.family import ConfigFields, Family


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = read_latent_decoder(fields, "deepseekv3")
    if not fields.flag("rope_interleave", True):
        raise fields.error("'rope_interleave' must be true")
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.text(key, expected) != expected:
            raise fields.error(f"{key!r} must be {expected!r}, not {fields.get(key)!r}")
    experts = read_routed_experts(fields, config.layers)
    if experts is None:
        return config
    experts = replace(
        read_groups(fields, experts),
        normalised=fields.flag("norm_topk_prob", True),
        scoring="sigmoid",
        corrected=True,
    )
    return replace(config, experts=experts)


FAMILY = Family(
    name="deepseekv3",
    model_type="deepseek_v3",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
)
