"""Qwen3-Next (Qwen3-Next-80B-A3B, Qwen3-Coder-Next): the gated delta rule in most layers, attention
with an output gate in the others, mixtures of experts.

Qwen Team, "Qwen3-Next: Towards Ultimate Training & Inference Efficiency", 2025. Names and defaults
of fields are those of transformers' Qwen3Next; those of GGUF are what llama.cpp's converter writes
(the architecture "qwen3next" of gguf-py). Qwen3.5's families have most of it, too.
"""

from dataclasses import replace

from midfill.models import gguf_config, huggingface_config
from midfill.models.config import DeltaRule, Experts, ModelConfig
from midfill.models.family import EXPERT_MODULES, ConfigFields, Family, Shapes

_STATE = "linear_attention"
_PREFIX = "linear_attn"
_MAX_LAYERS = 10_000
_ROTARY_SHARE = 0.25

MODULES = {
    **EXPERT_MODULES,
    # Those without an entry in files are gathered from others, ``checkpoints.gathered_rows``.
    "q_gate": "self_attn.q_gate",
    "ssm": _PREFIX,
    "ssm_qkvz": f"{_PREFIX}.in_proj_qkvz",
    "ssm_qkv": f"{_PREFIX}.in_proj_qkv",
    "ssm_gate": f"{_PREFIX}.in_proj_z",
    "ssm_ba": f"{_PREFIX}.in_proj_ba",
    "ssm_beta": f"{_PREFIX}.in_proj_b",
    "ssm_alpha": f"{_PREFIX}.in_proj_a",
    "ssm_conv": f"{_PREFIX}.conv1d",
    "ssm_norm": f"{_PREFIX}.norm",
    "ssm_out": f"{_PREFIX}.out_proj",
}

GGUF_MODULES = {
    "attn_qkv": "ssm_qkv",
    "attn_gate": "ssm_gate",
    "ssm_in": "ssm_qkvz",  # of older files
    "ssm_ba": "ssm_ba",
    "ssm_beta": "ssm_beta",
    "ssm_alpha": "ssm_alpha",
    "post_attention_norm": "mlp_norm",
}


def read_huggingface(fields: ConfigFields, family: str, *, ffn_key: str) -> ModelConfig:
    """Read a config.json, but for mixtures of experts.

    Args:
        fields: its content.
        family: name of the family.
        ffn_key: key of the inner size of dense MLPs.

    Raises:
        CheckpointError: a field is missing, malformed or asks for something unsupported.
    """
    if fields.flag("attention_bias", False):
        raise fields.error(f"'attention_bias' is not supported with {family}")
    config = huggingface_config.read_decoder(
        fields, family, reads_partial_rotary=True, ffn_key=ffn_key
    )
    head_dim = fields.size("head_dim", 256)
    config = replace(
        config,
        head_dim=head_dim,
        qk_norm=True,
        gated_attention=True,
        rotated=huggingface_config.read_rotated(fields, head_dim, _ROTARY_SHARE),
    )
    layers = _state_layers(fields, config.layers)
    rule = DeltaRule(
        layers=layers,
        heads=fields.size("linear_num_value_heads", 32),
        head_dim=fields.size("linear_value_head_dim", 128),
        state_dim=fields.size("linear_key_head_dim", 128),
        conv_width=fields.size("linear_conv_kernel_dim", 4),
        key_heads=fields.size("linear_num_key_heads", 16),
    )
    return _with_states(fields, config, rule)


def read_huggingface_experts(
    fields: ConfigFields, layers: int, *, per_token: int
) -> Experts | None:
    """Read the mixtures of experts of a config.json; the probabilities of those chosen add up to 1
    where it doesn't say.

    Args:
        fields: its content.
        layers: of the model.
        per_token: experts per token, where it doesn't say.

    Raises:
        CheckpointError: see ``huggingface_config.read_experts``.
    """
    shared = fields.size("shared_expert_intermediate_size", 512)
    experts = huggingface_config.read_experts(
        fields, layers, per_token=per_token, shared_ffn=shared
    )
    if experts is None:
        return None
    return replace(experts, normalised=fields.flag("norm_topk_prob", True))


def read_gguf(
    fields: ConfigFields, shapes: Shapes, family: str, experts: Experts | None, *, tiled: bool
) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Args:
        fields: the keys below the architecture's prefix.
        shapes: canonical name -> shape of all tensors.
        family: name of the family.
        experts: the mixtures, if it has any.
        tiled: see ``DeltaRule``.

    Raises:
        CheckpointError: a key is missing, malformed or asks for something unsupported.
    """
    config = gguf_config.read_decoder(
        fields, shapes, family, experts=experts, reads_partial_rotary=True
    )
    layers = config.layers - fields.integer("nextn_predict_layers", 0)
    if not 0 < layers <= config.layers:
        raise fields.error(f"{config.layers} layers can't have {config.layers - layers} predictors")
    rotated = fields.size("rope.dimension_count", config.head_dim)
    config = replace(
        config,
        layers=layers,
        qk_norm=True,
        gated_attention=True,
        rotated=None if rotated == config.head_dim else rotated,
    )
    if config.layers > _MAX_LAYERS:
        raise fields.error(f"'block_count' must be at most {_MAX_LAYERS}, not {config.layers}")
    inner, heads = fields.size("ssm.inner_size"), fields.size("ssm.time_step_rank")
    if inner % heads:
        raise fields.error(f"{heads} heads can't share an inner size of {inner}")
    rule = DeltaRule(
        layers=tuple(i for i in range(layers) if f"layers.{i}.ssm_conv.weight" in shapes),
        heads=heads,
        head_dim=inner // heads,
        state_dim=fields.size("ssm.state_size"),
        conv_width=fields.size("ssm.conv_kernel"),
        key_heads=fields.size("ssm.group_count"),
        tiled=tiled,
        logarithmic=False,
    )
    return _with_states(fields, config, rule)


def _state_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    if layers > _MAX_LAYERS:
        raise fields.error(f"'num_hidden_layers' must be at most {_MAX_LAYERS}, not {layers}")
    kinds = fields.texts("layer_types")
    if not kinds:
        every = fields.size("full_attention_interval", 4)
        return tuple(i for i in range(layers) if (i + 1) % every)
    if len(kinds) != layers or set(kinds) - {_STATE, huggingface_config.FULL}:
        raise fields.error(
            f"'layer_types' must name {_STATE} or {huggingface_config.FULL} for every layer"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == _STATE)


def _with_states(fields: ConfigFields, config: ModelConfig, rule: DeltaRule) -> ModelConfig:
    """Return the configuration with layers that have a state, once they are known to be supported.

    Raises:
        CheckpointError: they are not.
    """
    if not rule.layers:
        return config
    if len(rule.layers) == config.layers:
        raise fields.error("a model without any layer with attention is not supported")
    if rule.heads % rule.key_heads:
        raise fields.error(f"{rule.heads} heads of values can't share {rule.key_heads} of keys")
    if rule.conv_width < 2:
        raise fields.error(f"a convolution over {rule.conv_width} row is not supported")
    return replace(config, state_space=rule)


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    config = read_huggingface(fields, "qwen3next", ffn_key="intermediate_size")
    experts = read_huggingface_experts(fields, config.layers, per_token=10)
    return replace(config, experts=experts)


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    experts = gguf_config.read_experts(fields, shapes, normalised=True)
    return read_gguf(fields, shapes, "qwen3next", experts, tiled=False)


FAMILY = Family(
    name="qwen3next",
    model_type="qwen3_next",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
    from_gguf=_from_gguf,
    norm_offset=1.0,
    gguf_modules=GGUF_MODULES,
    skips_predictors=True,
)
