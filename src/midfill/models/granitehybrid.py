"""Granite 4.0-H: Granite's four scalars, Mamba-2 in most layers, attention in the others.

Names and defaults of fields are those of transformers' GraniteMoeHybrid; those of GGUF are what
llama.cpp's converter writes (the architecture "granitehybrid" of gguf-py). The family's dense
models are read: 350M, 1B and Micro, and those of them whose layers all have attention.
"""

import math
from dataclasses import replace

from midfill.errors import CheckpointError
from midfill.models import gguf_config, huggingface_config
from midfill.models.config import ModelConfig, StateSpace
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family, Shapes
from midfill.models.granite import gguf_scalars, huggingface_scalars

_STATE_KINDS = ("mamba", "linear_attention")
_ATTENTION_KINDS = ("attention", "full_attention")
"""Names of kinds of layers, of older versions of transformers and of newer ones."""
_UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Limits of dt, as config.json has them."""
_MAX_LAYERS = 10_000

MODULES = {
    **LLAMA_MODULES,
    # One matrix in the file, ``huggingface.split_stacked``.
    "gate": "shared_mlp.gate_proj",
    "up": "shared_mlp.up_proj",
    "down": "shared_mlp.output_linear",
    "ssm": "mamba",
    "ssm_in": "mamba.in_proj",
    "ssm_conv": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    if fields.integer("num_local_experts", 8) > 0:
        raise _routed(fields, "num_local_experts")
    for flag in ("attention_bias", "mamba_proj_bias"):
        if fields.flag(flag, False):
            raise fields.error(f"{flag!r} is not supported with model type granitemoehybrid")
    # transformers has such an MLP in any case, and the file's other size stands for experts.
    config = replace(
        huggingface_config.read_decoder(fields, "granitehybrid"),
        ffn=fields.size("shared_intermediate_size", 1024),
        has_rope=fields.get("position_embedding_type") == "rope",
        **huggingface_scalars(fields),
    )
    layers = _state_layers(fields, config.layers)
    if not layers:
        return config
    limit = fields.get("time_step_limit")
    if limit is not None and limit not in _UNLIMITED:
        raise fields.error(f"'time_step_limit' must be [0, Infinity], not {limit!r}")
    inner = fields.size("mamba_expand", 2) * config.hidden
    heads = fields.size("mamba_n_heads", 128)
    head_dim = inner // heads if fields.get("mamba_d_head") in (None, "auto") else None
    space = StateSpace(
        layers=layers,
        heads=heads,
        head_dim=head_dim or fields.size("mamba_d_head"),
        state_dim=fields.size("mamba_d_state", 256),
        conv_width=fields.size("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
    )
    if space.inner != inner:
        raise fields.error(
            f"'mamba_n_heads' times 'mamba_d_head' must be 'mamba_expand' times 'hidden_size', "
            f"{inner}, not {space.inner}"
        )
    return _with_states(fields, config, space, fields.size("mamba_n_groups", 1))


def _state_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    if layers > _MAX_LAYERS:
        raise fields.error(f"'num_hidden_layers' must be at most {_MAX_LAYERS}, not {layers}")
    kinds = fields.texts("layer_types") or _STATE_KINDS[:1] * layers
    if len(kinds) != layers or set(kinds) - {*_STATE_KINDS, *_ATTENTION_KINDS}:
        raise fields.error("'layer_types' must name mamba or attention for every layer")
    return tuple(i for i, kind in enumerate(kinds) if kind in _STATE_KINDS)


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    if fields.integer("expert_count", 0) > 0:
        raise _routed(fields, "expert_count")
    listed = isinstance(fields.get("attention.head_count_kv"), list)
    by_layer = fields.whole_numbers("attention.head_count_kv") if listed else ()
    kv_heads = max(by_layer, default=0) or None
    config = replace(
        gguf_config.read_decoder(fields, shapes, "granitehybrid", kv_heads=kv_heads),
        # llama.cpp takes this key for the switch, and a missing one for true.
        has_rope=fields.flag("rope.scaling.finetuned", True),
        **gguf_scalars(fields),
    )
    if any(count not in (0, kv_heads) for count in by_layer):
        raise fields.error("layers with different numbers of KV heads are not supported")
    if len(by_layer) not in (0, config.layers):
        raise fields.error(f"'attention.head_count_kv' must list {config.layers} layers")
    up = shapes.get("layers.0.up.weight")
    config = config if up is None else replace(config, ffn=up[0])
    layers = tuple(i for i, count in enumerate(by_layer) if count == 0)
    if not layers:
        return config
    inner, heads = fields.size("ssm.inner_size"), fields.size("ssm.time_step_rank")
    if inner % heads:
        raise fields.error(f"{heads} heads can't share an inner size of {inner}")
    space = StateSpace(
        layers=layers,
        heads=heads,
        head_dim=inner // heads,
        state_dim=fields.size("ssm.state_size"),
        conv_width=fields.size("ssm.conv_kernel"),
        conv_bias=f"layers.{layers[0]}.ssm_conv.bias" in shapes,
        logarithmic=False,
    )
    return _with_states(fields, config, space, fields.size("ssm.group_count", 1))


def _with_states(
    fields: ConfigFields, config: ModelConfig, space: StateSpace, groups: int
) -> ModelConfig:
    """Return the configuration with layers that have a state, once they are known to be supported.

    Raises:
        CheckpointError: they are not.
    """
    if len(space.layers) == config.layers:
        raise fields.error("a model without any layer with attention is not supported")
    if groups != 1:
        raise fields.error(f"Mamba-2 with {groups} groups of heads is not supported, only with one")
    if space.conv_width < 2:
        raise fields.error(f"a convolution over {space.conv_width} row is not supported")
    return replace(config, state_space=space)


def _routed(fields: ConfigFields, key: str) -> CheckpointError:
    return fields.error(
        f"{key!r} must be 0: of Granite 4.0-H, midfill runs the dense models (350M, 1B, Micro), "
        "not those with routed experts (Tiny, Small)"
    )


FAMILY = Family(
    name="granitehybrid",
    model_type="granitemoehybrid",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES,
    from_gguf=_from_gguf,
    gguf_interleaved_rotary=True,
)
