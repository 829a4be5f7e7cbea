"""The supported model families: from a checkpoint's own description to ModelConfig and names.

Every family is tested with tiny random checkpoints against transformers. Real weights are tested
for llama (SmolLM2-135M) and gemma3 (Gemma 3 270M) only.

To add a family: write its file with a ``FAMILY`` and list it in ``FAMILIES`` here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from midfill.errors import CheckpointError
from midfill.models import (
    deepseek2,
    deepseekv3,
    gemma,
    gemma3,
    gemma3n,
    gguf_config,
    gptoss,
    granite,
    granitehybrid,
    huggingface_config,
    llama,
    mistral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen35,
    qwen35moe,
    starcoder2,
)
from midfill.models.config import ModelConfig, tensor_shapes
from midfill.models.family import ConfigFields, Family

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        llama,
        deepseek2,
        deepseekv3,
        gemma,
        gemma3,
        gemma3n,
        gptoss,
        granite,
        granitehybrid,
        olmo2,
        olmo3,
        olmoe,
        phi3,
        qwen2,
        qwen2moe,
        qwen3,
        qwen3moe,
        qwen3next,
        qwen35,
        qwen35moe,
        starcoder2,
        mistral,
    )
}
_BY_MODEL_TYPE = {family.model_type or name: family for name, family in FAMILIES.items()}
_MULTIMODAL = {family.multimodal_type for family in FAMILIES.values()} - {""}


def config_from_huggingface(config: Mapping[str, object]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face checkpoint.

    Args:
        config: the content of its config.json.

    Raises:
        CheckpointError: the architecture is unknown, or a field is missing, malformed or asks for
            something unsupported.
    """
    fields = ConfigFields(config, huggingface_config.SOURCE)
    name = fields.text("model_type")
    if name in _MULTIMODAL:
        source = f"{huggingface_config.SOURCE}: text_config"
        fields = ConfigFields(fields.table("text_config"), source)
        name = fields.text("model_type")
    if name not in _BY_MODEL_TYPE:
        known = ", ".join(sorted(_BY_MODEL_TYPE))
        raise fields.error(f"model type {name!r} is not supported; midfill runs {known}")
    return _checked(_BY_MODEL_TYPE[name].from_huggingface(fields), huggingface_config.SOURCE)


def config_from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] = (),
) -> ModelConfig:
    """Return the ModelConfig of a GGUF file.

    Args:
        metadata: key -> plain value, the file's key-value section.
        shapes: canonical name -> logical shape (out_features first) of the file's tensors. They
            determine the vocabulary, the biases and whether the embeddings are tied.
        rope_factors: the values of the tensor ``rope_freqs.weight`` if the file has it.

    Raises:
        CheckpointError: as for ``config_from_huggingface``.
    """
    name = ConfigFields(metadata, gguf_config.SOURCE).text("general.architecture")
    family = FAMILIES.get(name)
    if family is None or family.from_gguf is None:
        known = sorted(name for name, family in FAMILIES.items() if family.from_gguf is not None)
        raise CheckpointError(
            f"{gguf_config.SOURCE}: architecture {name!r} is not supported; "
            f"midfill runs {', '.join(known)}"
        )
    config = family.from_gguf(ConfigFields(metadata, gguf_config.SOURCE, f"{name}."), shapes)
    if rope_factors:
        factors = tuple(float(factor) for factor in rope_factors)
        config = replace(config, rope_scaling=gguf_config.with_frequency_factors(config, factors))
    bos_token_id, eos_token_ids = gguf_config.token_ids(metadata)
    config = replace(config, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids)
    return _checked(config, gguf_config.SOURCE)


def huggingface_names(config: ModelConfig) -> dict[str, str]:
    """Return canonical name -> Hugging Face tensor name, for every tensor of the model."""
    modules = FAMILIES[config.family].huggingface_modules
    names = {}
    for name in tensor_shapes(config):
        head, leaf = name.rsplit(".", 1)
        if head.startswith("layers."):
            _, layer, module = head.split(".", 2)
            names[name] = f"model.layers.{layer}.{_their_module(modules, module)}.{leaf}"
        else:
            names[name] = f"{modules[head]}.{leaf}"
    return names


def _their_module(modules: Mapping[str, str], module: str) -> str:
    if not module.startswith("experts."):
        return modules[module]
    _, expert, part = module.split(".")
    return modules[f"experts.{part}"].format(expert=expert)


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """Return the same config once its sizes are known to be consistent."""
    if config.query_heads % config.kv_heads:
        raise CheckpointError(
            f"{source}: {config.query_heads} query heads can't share {config.kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(
            f"{source}: a head dimension of {config.head_dim} has no rotary halves; it must be even"
        )
    experts = config.experts
    if experts is not None and experts.per_token > experts.count:
        raise CheckpointError(
            f"{source}: a token can't be sent to {experts.per_token} of {experts.count} experts"
        )
    if min(config.rope_theta, config.local_rope_theta or 1.0) <= 0 or config.norm_epsilon < 0:
        raise CheckpointError(
            f"{source}: RoPE theta must be above 0, the norm's epsilon at least 0"
        )
    return config
