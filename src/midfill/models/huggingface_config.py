"""A Hugging Face config.json: the fields that all decoder families share."""

from collections.abc import Mapping

from midfill.models.config import Activation, Experts, ModelConfig, RopeScaling, RopeScalingKind
from midfill.models.family import ConfigFields

SOURCE = "config.json"
_MAX_LAYERS = 10_000
FULL, SLIDING = "full_attention", "sliding_attention"
"""Names of the kinds of layers."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SCALING_KINDS: Mapping[str, RopeScalingKind] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
}


def read_decoder(
    fields: ConfigFields,
    family: str,
    *,
    activation: str = "silu",
    epsilon_key: str = "rms_norm_eps",
    epsilon: float = 1e-6,
    tied_embeddings: bool = False,
    layer_type: str = "",
    quantization: str = "",
    reads_partial_rotary: bool = False,
    ignores_scaling: bool = False,
    ffn_key: str = "intermediate_size",
) -> ModelConfig:
    """Read the part of a config.json that all families write alike.

    Args:
        fields: the content of config.json.
        family: name of the family for the ModelConfig.
        activation, epsilon, tied_embeddings: what transformers assumes for missing keys.
        epsilon_key: key of the norm's epsilon.
        layer_type: the layers whose rotary embedding is read, where kinds of layers differ.
        quantization: the method of quantisation that the family's files are read with, if any.
        reads_partial_rotary: whether the family reads which part of a head is rotated.
        ignores_scaling: whether the family reads RoPE scaling by itself.
        ffn_key: key of the inner size of MLPs.

    Raises:
        CheckpointError: a field is missing, malformed or asks for something unsupported.
    """
    _reject_unsupported(fields, quantization)
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    theta, scaling, context = _read_rope(
        fields, layer_type, partial=reads_partial_rotary, scaled=not ignores_scaling
    )
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        family=family,
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        query_heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", hidden // heads),
        ffn=fields.size(ffn_key),
        vocab=fields.size("vocab_size"),
        context=context,
        norm_epsilon=fields.number(epsilon_key, epsilon),
        activation=_read_activation(fields, activation),
        tied_embeddings=fields.flag("tie_word_embeddings", tied_embeddings),
        rope_theta=theta,
        rope_scaling=scaling,
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
    )


def read_rotated(fields: ConfigFields, head_dim: int, default: float) -> int | None:
    """Return how many numbers of a head are rotated; None if all are.

    Args:
        fields: the content of config.json.
        head_dim: numbers of a head.
        default: which part of them is rotated, where the file doesn't say.

    Raises:
        CheckpointError: the others aren't whole pairs.
    """
    rope = ConfigFields(_rope_table(fields, ""), f"{fields.source}: rope parameters")
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", default))
    rotated = int(head_dim * share)
    if not 0 < rotated <= head_dim or rotated % 2 or (head_dim - rotated) % 2:
        raise fields.error(
            f"'partial_rotary_factor' {share} of heads of {head_dim} must leave whole pairs"
        )
    return None if rotated == head_dim else rotated


def read_layer_windows(
    fields: ConfigFields, layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """Read the sliding window and the layers that use it, as Qwen states them.

    ``layer_types`` names each layer's kind. Older files give ``max_window_layers`` instead: the
    number of first layers that see everything.

    Returns:
        ``ModelConfig.sliding_window`` and ``ModelConfig.windowed_layers``.
    """
    if not fields.flag("use_sliding_window", False) or fields.get("sliding_window") is None:
        return None, None
    windowed = read_windowed_layers(fields, layers)
    if windowed is None:
        windowed = tuple(range(fields.integer("max_window_layers", layers), layers))
    if not windowed:
        return None, None
    return fields.size("sliding_window"), None if len(windowed) == layers else windowed


def read_windowed_layers(fields: ConfigFields, layers: int) -> tuple[int, ...] | None:
    """Return the layers that ``layer_types`` says have a sliding window; None if it is missing."""
    kinds = fields.texts("layer_types")
    if not kinds:
        return None
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        raise fields.error(f"'layer_types' must name {FULL} or {SLIDING} for every layer")
    return tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)


def read_experts(
    fields: ConfigFields,
    layers: int,
    *,
    per_token: int,
    shared_ffn: int = 0,
    ffn_key: str = "moe_intermediate_size",
) -> Experts | None:
    """Read the mixtures of experts as Qwen states them; None if no layer has one.

    Args:
        fields: the content of config.json.
        layers: of the model.
        per_token: experts per token, where the file doesn't say.
        shared_ffn: inner size of the shared expert.
        ffn_key: key of the inner size of the others.

    Raises:
        CheckpointError: a field is missing or malformed.
    """
    count = fields.integer("num_local_experts", fields.integer("num_experts", 0))
    every = fields.size("decoder_sparse_step", 1)
    listed = fields.whole_numbers("mlp_only_layers")
    if every == 1:
        dense = tuple(sorted({layer for layer in listed if layer < layers}))
    elif layers <= _MAX_LAYERS:
        dense = tuple(i for i in range(layers) if i in listed or (i + 1) % every)
    else:
        raise fields.error(f"'num_hidden_layers' must be at most {_MAX_LAYERS}, not {layers}")
    if count <= 0 or len(dense) == layers:
        return None
    return Experts(
        count=count,
        per_token=fields.size("num_experts_per_tok", per_token),
        ffn=fields.size(ffn_key),
        normalised=fields.flag("norm_topk_prob", False),
        shared_ffn=shared_ffn,
        dense_layers=dense,
    )


def _reject_unsupported(fields: ConfigFields, quantization: str) -> None:
    architectures = fields.texts("architectures")
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise fields.error(
            f"{architectures[0]} is not a causal language model; use the model's ForCausalLM files"
        )
    stated = fields.table("quantization_config")
    method = stated.get("quant_method", "an unnamed method")
    if stated and method != quantization:
        raise fields.error(
            f"weights quantised with {method} are not supported; use the unquantised model or a "
            "GGUF file"
        )


def _read_activation(fields: ConfigFields, default: str) -> Activation:
    name = fields.text("hidden_act", default)
    if name not in _ACTIVATIONS:
        raise fields.error(
            f"activation {name!r} is not supported; midfill knows {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _read_rope(
    fields: ConfigFields, layer_type: str, *, partial: bool, scaled: bool
) -> tuple[float, RopeScaling, int]:
    """Read theta, scaling and context length, in the spelling of transformers 5 or older.

    transformers 5 writes ``rope_parameters`` with theta and type inside. Older versions write
    ``rope_theta`` and ``rope_scaling``.
    """
    positions = fields.size("max_position_embeddings")
    rope = ConfigFields(_rope_table(fields, layer_type), f"{fields.source}: rope parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        raise fields.error(f"partial rotary embeddings (factor {share}) are not supported")
    if not scaled:
        return theta, RopeScaling(), positions
    name = rope.text("rope_type", rope.text("type", "default"))
    if name not in _SCALING_KINDS:
        raise fields.error(
            f"RoPE scaling {name!r} is not supported; midfill knows {', '.join(_SCALING_KINDS)}"
        )
    kind = _SCALING_KINDS[name]
    if kind == "none":
        return theta, RopeScaling(), positions
    scaling = _read_scaling(kind, rope, fields, positions)
    # Dynamic scaling and YaRN extend the stated context; linear and llama3 files state the
    # extended length.
    if kind == "dynamic":
        return theta, scaling, int(positions * scaling.factor)
    if kind == "yarn":
        return theta, scaling, max(positions, int(scaling.original_context * scaling.factor))
    return theta, scaling, positions


def _rope_table(fields: ConfigFields, layer_type: str) -> Mapping[str, object]:
    table = fields.table("rope_parameters") or fields.table("rope_scaling")
    nested = [value for value in table.values() if isinstance(value, Mapping)]
    if not nested:
        return table
    own = table.get(layer_type)
    if isinstance(own, Mapping):
        return own
    if any(value != nested[0] for value in nested):
        raise fields.error("RoPE parameters that differ between layers are not supported")
    return nested[0]


def _read_scaling(
    kind: RopeScalingKind, rope: ConfigFields, fields: ConfigFields, positions: int
) -> RopeScaling:
    original = fields.size(
        "original_max_position_embeddings",
        rope.size("original_max_position_embeddings", positions),
    )
    if kind == "yarn":
        return RopeScaling(
            kind=kind,
            factor=_positive(rope, "factor", positions / original),
            original_context=original,
            # transformers treats 0 as "not given" here.
            beta_fast=rope.number("beta_fast", 32.0) or 32.0,
            beta_slow=rope.number("beta_slow", 1.0) or 1.0,
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
        )
    factor = _positive(rope, "factor")
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_context=original,
            low_freq_factor=_positive(rope, "low_freq_factor"),
            high_freq_factor=_positive(rope, "high_freq_factor"),
        )
    if kind == "dynamic":
        return RopeScaling(kind=kind, factor=factor, original_context=positions)
    return RopeScaling(kind=kind, factor=factor)


def _positive(fields: ConfigFields, key: str, default: float | None = None) -> float:
    value = fields.number(key, default)
    if value <= 0:
        raise fields.error(f"{key!r} must be above 0, not {value}")
    return value
