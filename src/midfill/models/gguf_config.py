"""GGUF metadata: the keys that all decoder architectures share.

Keys and their meaning: the GGUF specification in ggml's docs/gguf.md.
"""

import math
from collections.abc import Mapping

from midfill.models.config import Experts, ModelConfig, RopeScaling
from midfill.models.family import ConfigFields, Shapes

SOURCE = "GGUF metadata"


def read_decoder(
    fields: ConfigFields,
    shapes: Shapes,
    family: str,
    *,
    epsilon_key: str = "attention.layer_norm_rms_epsilon",
    full_every: int = 0,
    experts: Experts | None = None,
    head_dim: int | None = None,
    reads_partial_rotary: bool = False,
    kv_heads: int | None = None,
) -> ModelConfig:
    """Read the part that all architectures write alike.

    The tensors themselves determine biases and tied embeddings. Token ids are not below the
    architecture's prefix, so ``families`` adds them.

    Args:
        fields: the keys below the architecture's prefix.
        shapes: canonical name -> shape of all tensors.
        family: name of the family for the ModelConfig.
        epsilon_key: key of the norm's epsilon.
        full_every: every so many layers one sees everything, where the file names no layers; 0
            windows all layers or none.
        experts: from ``read_experts``, for families that have any.
        head_dim: of a key, for families in which it differs from a value's.
        reads_partial_rotary: whether the family reads which part of a head is rotated.
        kv_heads: for families whose files list them layer by layer.

    Raises:
        CheckpointError: a key is missing, malformed or asks for something unsupported.
    """
    if experts is None and fields.integer("expert_count", 0) > 0:
        raise fields.error("mixture-of-experts models of this architecture are not supported")
    if "embed.weight" not in shapes:
        raise fields.error("the file holds no token embedding (tensor token_embd.weight)")
    hidden = fields.size("embedding_length")
    heads = fields.size("attention.head_count")
    head_dim = head_dim or _read_head_dim(fields, hidden // heads, reads_partial_rotary)
    window, windowed = _read_windows(fields, full_every)
    scaling = _read_scaling(fields)
    context = fields.size("context_length")
    if scaling.kind == "yarn":
        context = max(context, int(scaling.original_context * scaling.factor))
    return ModelConfig(
        family=family,
        layers=fields.size("block_count"),
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads or fields.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        # Files of models all of whose MLPs are experts may leave it out.
        ffn=fields.size("feed_forward_length", None if experts is None else experts.ffn),
        vocab=shapes["embed.weight"][0],
        context=context,
        norm_epsilon=fields.number(epsilon_key),
        qkv_bias="layers.0.q.bias" in shapes,
        output_bias="layers.0.o.bias" in shapes,
        mlp_bias="layers.0.up.bias" in shapes,
        tied_embeddings="lm_head.weight" not in shapes,
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        sliding_window=window,
        windowed_layers=windowed,
        experts=experts,
    )


def read_experts(fields: ConfigFields, shapes: Shapes, *, normalised: bool) -> Experts:
    """Read the mixtures of experts; a layer whose tensors are those of one MLP has none.

    Args:
        fields: the keys below the architecture's prefix.
        shapes: canonical name -> shape of all tensors.
        normalised: ``Experts.normalised``, where the file doesn't say.

    Raises:
        CheckpointError: a key is missing or malformed.
    """
    per_token = fields.size("expert_used_count")
    has_ffn = fields.get("expert_feed_forward_length") is not None
    up = [(name.split("."), shape) for name, shape in shapes.items() if name.endswith("up.weight")]
    shared = max((shape[0] for parts, shape in up if parts[2] == "shared"), default=0)
    return Experts(
        count=fields.size("expert_count"),
        per_token=per_token,
        # llama.cpp assumes the same where the key is missing.
        ffn=fields.size("expert_feed_forward_length")
        if has_ffn
        else fields.size("feed_forward_length") // per_token,
        normalised=fields.flag("expert_weights_norm", normalised),
        shared_ffn=fields.integer("expert_shared_feed_forward_length", shared),
        dense_layers=tuple(sorted(int(parts[1]) for parts, _ in up if parts[2] == "up")),
    )


def with_frequency_factors(config: ModelConfig, factors: tuple[float, ...]) -> RopeScaling:
    """Return the scaling of a file with a ``rope_freqs.weight`` tensor: GGUF's llama3 scaling.

    Args:
        config: the configuration read from the metadata.
        factors: the tensor's head_dim / 2 values; each divides one frequency.

    Raises:
        CheckpointError: length or values are wrong, or the file states another scaling, too.
    """
    error = ConfigFields({}, SOURCE).error
    if config.rope_scaling.kind != "none":
        raise error(
            f"rope_freqs.weight beside RoPE scaling {config.rope_scaling.kind!r} is not supported"
        )
    if len(factors) != config.rotary_dim // 2:
        raise error(
            f"rope_freqs.weight holds {len(factors)} values, a head of {config.rotary_dim} "
            f"needs {config.rotary_dim // 2}"
        )
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise error("rope_freqs.weight must hold finite values above 0")
    sharper = config.rope_scaling.attention_factor
    return RopeScaling(kind="factors", frequency_factors=factors, attention_factor=sharper)


def rope_factors_of(metadata: Mapping[str, object]) -> str:
    """Return the name of the tensor that has frequency factors, if the file has any.

    LongRoPE's files have two, of which that of the longest text is used.
    """
    fields = ConfigFields(
        metadata, SOURCE, f"{ConfigFields(metadata, SOURCE).text('general.architecture')}."
    )
    original = fields.get("rope.scaling.original_context_length")
    if original is None or fields.text("rope.scaling.type", "longrope") != "longrope":
        return "rope_freqs.weight"
    is_long = fields.size("context_length") > fields.size("rope.scaling.original_context_length")
    return f"rope_factors_{'long' if is_long else 'short'}.weight"


def _read_head_dim(fields: ConfigFields, default: int, partial: bool) -> int:
    head_dim = fields.size("attention.key_length", default)
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise fields.error("key and value heads of different sizes are not supported")
    rotary = fields.size("rope.dimension_count", head_dim)
    if rotary != head_dim and not partial:
        raise fields.error(
            f"partial rotary embeddings ({rotary} of {head_dim} dimensions) are not supported"
        )
    return head_dim


def _read_windows(
    fields: ConfigFields, full_every: int
) -> tuple[int | None, tuple[int, ...] | None]:
    window = fields.integer("attention.sliding_window", 0)
    if window <= 0:
        return None, None
    pattern = fields.get("attention.sliding_window_pattern")
    layers = fields.size("block_count")
    if full_every and not isinstance(pattern, list):
        every = fields.size("attention.sliding_window_pattern", full_every)
        pattern = [bool((layer + 1) % every) for layer in range(layers)]
    if pattern is None:
        return window, None
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise fields.error(
            f"'attention.sliding_window_pattern' must be a list of {layers} flags, one per layer"
        )
    windowed = tuple(i for i, flag in enumerate(pattern) if flag)
    if not windowed:
        return None, None
    return window, None if len(windowed) == layers else windowed


def _read_scaling(fields: ConfigFields) -> RopeScaling:
    kind = fields.text("rope.scaling.type", "none")
    if kind == "longrope" and fields.get("rope.scaling.attn_factor") is not None:
        kind = "none"  # but for the tensors of factors, see ``rope_factors_of``
    # Files from before rope.scaling.* existed carry a lone linear factor.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if factor <= 0:
        raise fields.error(f"'rope.scaling.factor' must be above 0, not {factor}")
    if kind == "none" and fields.get("rope.scale_linear") is not None:
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        # llama.cpp multiplies YaRN's own attention factor by the file's.
        own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_context=fields.size(
                "rope.scaling.original_context_length", fields.size("context_length")
            ),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=own * fields.number("rope.scaling.attn_factor", 1.0),
        )
    raise fields.error(f"RoPE scaling {kind!r} is not supported; midfill knows none, linear, yarn")


def token_ids(metadata: Mapping[str, object]) -> tuple[int | None, tuple[int, ...]]:
    """Return the BOS id and the end ids (of sequence, turn and message) without repeats."""
    fields = ConfigFields(metadata, SOURCE, "tokenizer.ggml.")
    bos = fields.token_ids("bos_token_id")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = dict.fromkeys(token for key in keys for token in fields.token_ids(key))
    return (bos[0] if bos else None), tuple(ends)
