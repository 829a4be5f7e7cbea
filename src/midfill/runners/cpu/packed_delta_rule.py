"""Layers with the delta rule in the CPU kernels' form, and gates of the other layers' attention."""

import numpy as np

from midfill.kernels.cpu.simd import LANES
from midfill.kernels.cpu.state_space.data import DeltaSizes, DeltaWeights
from midfill.kernels.cpu.weight_formats import PANEL, panel_count
from midfill.models.config import DeltaRule, ModelConfig
from midfill.runners.cpu.packed_matrices import Arrays, packed_matrix, rms_norm
from midfill.runners.cpu.packed_state_space import OUTPUT, PROJECT, layer_numbers, norms_before

QUERY_GATE = "query_gate"


def unsupported_delta_rule(rule: DeltaRule) -> str | None:
    """Return why the kernels can't run such layers, or None if they can."""
    sizes = {
        "linear_value_head_dim": (rule.head_dim, PANEL),
        "linear_key_head_dim": (rule.state_dim, LANES),
        "the width of the convolution": (rule.mixed, PANEL),
    }
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"{name} = {size} is not a multiple of {unit}"
    return None


def assemble_delta_rule(config: ModelConfig, rule: DeltaRule, arrays: Arrays) -> DeltaWeights:
    """Return the kernels' structure of what was packed."""
    layers, hidden = len(rule.layers), config.hidden
    queries = config.query_heads * config.head_dim
    padded = panel_count(rule.projected) * PANEL
    zeros = np.zeros(config.layers * max(padded, hidden, rule.mixed, queries), np.float32)

    return DeltaWeights(
        sizes=DeltaSizes(
            layers=layers,
            heads=rule.heads,
            head_dim=rule.head_dim,
            state_dim=rule.state_dim,
            conv_width=rule.conv_width,
            inner=rule.inner,
            mixed=rule.mixed,
            layer_floats=rule.layer_floats,
            padded_heads=rule.heads + -rule.heads % LANES,
            stride=padded,
            key_heads=rule.key_heads,
            consecutive=1 if rule.tiled else rule.heads // rule.key_heads,
        ),
        numbers=np.array(layer_numbers(config), np.int32),
        before=rms_norm(config, norms_before(config, rule, arrays), hidden),
        project=packed_matrix(arrays, PROJECT, rule.projected, hidden, zeros),
        conv=arrays["ssm_conv"],
        conv_bias=zeros,
        dt_bias=arrays["ssm_dt_bias"],
        decay=arrays["ssm_decay"],
        head_norm=rms_norm(config, arrays["ssm_norm"], rule.head_dim),
        output=packed_matrix(arrays, OUTPUT, hidden, rule.inner, zeros),
        query_gate=packed_matrix(arrays, QUERY_GATE, queries, hidden, zeros),
    )
