"""Mixtures of experts in the CPU kernels' form: which matrices are packed as one, and how.

The matrices of all experts of all layers lie one after the other, those of gate and up panel by
panel in turn, so that an expert's run of panels is one run of memory.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.experts.table import ExpertWeights
from midfill.kernels.cpu.linear import GateUpWeights, LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.weight_formats import PANEL, panel_count
from midfill.models.config import Experts, ModelConfig
from midfill.runners.cpu.packed_matrices import NOTHING, Arrays, packed_matrix
from midfill.stored_tensor import StoredTensor

ROUTER = "router"
_CORRECTION = "router_correction"
_ROUTER_BIAS, _IN_BIAS, _OUT_BIAS = "router_bias", "experts_in_bias", "experts_out_bias"
INTERLEAVED = ("experts_in", "shared_in")
_PARTS = {
    "experts_in": ("experts.{expert}.gate", "experts.{expert}.up"),
    "experts_out": ("experts.{expert}.down",),
    "shared_in": ("shared.gate", "shared.up"),
    "shared_out": ("shared.down",),
}
"""The checkpoint's matrices that are packed as one, by the name under which they are kept."""
OFFLOADED = ("experts_in", "experts_out")
"""Those that can be left on disk: a token needs a few experts' parts of them."""


def expert_sources(config: ModelConfig, names: Collection[str]) -> dict[str, list[list[str]]]:
    """Return the names of tensors that are packed together, in order, by what they become."""
    if config.experts is None:
        return {}
    sources: dict[str, list[list[str]]] = {}
    for packed, parts in _PARTS.items():
        experts = config.experts.count if packed.startswith("experts") else 1
        stacked = [
            [f"layers.{layer}.{part.format(expert=expert)}.weight" for part in parts]
            for layer in config.expert_layers
            for expert in range(experts)
        ]
        if stacked[0][0] in names:
            sources[packed] = stacked
    return sources


def is_mxfp4(sources: Mapping[str, list[list[str]]], kind: Callable[[str], str]) -> bool:
    """Return whether all matrices of all experts are stored in MXFP4.

    Args:
        sources: from ``expert_sources``.
        kind: returns the kind of a tensor by name.
    """
    stacks = [sources[name] for name in OFFLOADED if name in sources]
    names = (name for stack in stacks for parts in stack for name in parts)
    return len(stacks) > 0 and all(kind(name) == "mxfp4" for name in names)


def router_tensors(
    config: ModelConfig, tensor: Callable[[str], StoredTensor]
) -> list[list[StoredTensor]]:
    """Return each layer's router in float32, and below it the row of the shared expert."""
    assert config.experts is not None
    shared = ["shared_router"] if _gates_shared(config.experts) else []
    stacked = []
    for layer in config.expert_layers:
        rows: Float32Array = np.concatenate(
            [tensor(f"layers.{layer}.{part}.weight").to_float32() for part in ("router", *shared)]
        )
        stacked.append([StoredTensor(f"layers.{layer}.router.weight", rows.shape, "f32", rows)])
    return stacked


def router_corrections(
    config: ModelConfig, tensor: Callable[[str], StoredTensor]
) -> dict[str, Float32Array]:
    """Return what is added to the scores of each layer's experts, by the name it is kept under."""
    if config.experts is None or not config.experts.corrected:
        return {}
    added = [
        tensor(f"layers.{layer}.router.e_score_correction_bias").to_float32()
        for layer in config.expert_layers
    ]
    return {_CORRECTION: np.concatenate(added)}


def expert_biases(
    config: ModelConfig, tensor: Callable[[str], StoredTensor]
) -> dict[str, Float32Array]:
    """Return the biases of routers and experts, by the name they are kept under.

    Those of gate and up are in the order of their panels.
    """
    experts = config.experts
    if experts is None or not has_biases(config, experts):
        return {}

    def vector(name: str, size: int) -> Float32Array:
        stored = tensor(name).to_float32()
        return np.concatenate((stored, np.zeros(size - len(stored), np.float32)))

    rows = panel_count(experts.count + _gates_shared(experts)) * PANEL
    layers = config.expert_layers
    prefixes = [f"layers.{layer}.experts.{i}" for layer in layers for i in range(experts.count)]
    halves = [
        vector(f"{prefix}.{part}.bias", experts.ffn)
        for prefix in prefixes
        for part in ("gate", "up")
    ]
    in_turn = np.stack(halves).reshape(len(prefixes), 2, -1, PANEL).swapaxes(1, 2)
    return {
        _ROUTER_BIAS: np.concatenate(
            [vector(f"layers.{layer}.router.bias", rows) for layer in layers]
        ),
        _IN_BIAS: np.ascontiguousarray(in_turn).reshape(-1),
        _OUT_BIAS: np.concatenate(
            [vector(f"{prefix}.down.bias", config.hidden) for prefix in prefixes]
        ),
    }


def has_biases(config: ModelConfig, experts: Experts) -> bool:
    """Return whether routers and experts have biases, which kernels want together."""
    return experts.router_bias and config.mlp_bias


def unsupported_experts(config: ModelConfig, experts: Experts) -> str | None:
    """Return why the kernels can't run a mixture of experts, or None if they can."""
    if experts.router_bias != config.mlp_bias:
        return "a router with a bias and experts without, or the reverse"
    if experts.shared_ffn and (config.mlp_bias or config.activation == "swiglu_oai"):
        return "a shared expert with a bias or with clamped halves"
    if config.post_norms:
        return "norms of what experts put out"
    return None


def _gates_shared(experts: Experts) -> bool:
    """Return whether the router has a row for the shared expert."""
    return experts.shared_ffn > 0 and experts.shared_gated


def assemble_experts(config: ModelConfig, arrays: Arrays) -> ExpertWeights | None:
    """Return the kernels' structure of what was packed; None for models without experts."""
    experts = config.experts
    if experts is None:
        return None
    hidden, layers = config.hidden, len(config.expert_layers)
    # The kernel takes zeros for their biases.
    gate, up = _halves(arrays, "shared_in", experts.shared_ffn, hidden, layers)
    router_rows = panel_count(experts.count + _gates_shared(experts)) * PANEL
    return ExpertWeights(
        router=packed_matrix(
            arrays, ROUTER, router_rows, hidden, arrays.get(_ROUTER_BIAS, NOTHING)
        ),
        gate_up=_expert_halves(arrays, experts, hidden, layers),
        down=packed_matrix(
            arrays, "experts_out", hidden, experts.ffn, arrays.get(_OUT_BIAS, NOTHING)
        ),
        shared=GateUpWeights(gate, up, activation=0, gated=True),
        shared_down=packed_matrix(arrays, "shared_out", hidden, experts.shared_ffn),
        correction=arrays.get(_CORRECTION, np.zeros(0, np.float32)),
        weight_factor=np.array([experts.weight_factor], np.float32),
        swiglu_limit=np.array([config.swiglu_limit], np.float32),
    )


def _halves(
    arrays: Arrays, name: str, outputs: int, inputs: int, matrices: int
) -> list[LinearWeights]:
    """Return gate and up, each with its own panels."""
    matrix = packed_matrix(arrays, name, outputs, inputs)
    if len(matrix.panels) == 0:
        return [matrix, matrix]
    panels: npt.NDArray[np.int64] = matrix.panels.reshape(matrices, 2, -1, 2)
    return [
        matrix._replace(panels=np.ascontiguousarray(panels[:, half]).reshape(-1, 2))
        for half in (0, 1)
    ]


def _expert_halves(arrays: Arrays, experts: Experts, hidden: int, layers: int) -> LinearWeights:
    """Return gate and up as one matrix, whose panels are in the order of memory."""
    matrix = packed_matrix(
        arrays, "experts_in", 2 * experts.ffn, hidden, arrays.get(_IN_BIAS, NOTHING)
    )
    by_half = matrix.panels.reshape(layers * experts.count, 2, -1, 2)
    in_turn: Int64Array = np.ascontiguousarray(by_half.swapaxes(1, 2)).reshape(-1, 2)
    return matrix._replace(panels=in_turn)
