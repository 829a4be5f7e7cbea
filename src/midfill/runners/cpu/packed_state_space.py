"""Layers with a state in the CPU kernels' form: their weights, the memory of a step, the states."""

from collections.abc import Callable

import numpy as np

from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.memory import Float32Array, aligned_zeros
from midfill.kernels.cpu.simd import LANES
from midfill.kernels.cpu.state_space.data import (
    DeltaWeights,
    StateMemory,
    StateSizes,
    StateWeights,
)
from midfill.kernels.cpu.weight_formats import PANEL, panel_count
from midfill.models.config import ModelConfig, StateLayers, StateSpace
from midfill.runners.cpu.packed_matrices import Arrays, packed_matrix, rms_norm
from midfill.stored_tensor import StoredTensor

Tensor = Callable[[str], StoredTensor]

PROJECT, OUTPUT = "ssm_in", "ssm_out"


class CpuStates:
    """Implements ``kv.state_pool.StateStore``.

    Attributes:
        values: float32, all states one after the other, see ``StateWorkspace.values``. The system
            gives memory for a state when it is first written.
    """

    def __init__(self, space: StateLayers, count: int) -> None:
        self._count = count
        self.values: Float32Array = aligned_zeros(count * space.state_bytes // 4, np.float32)
        self._states = self.values.reshape(count, -1)

    @property
    def count(self) -> int:
        """See ``StateStore.count``."""
        return self._count

    @property
    def nbytes(self) -> int:
        """See ``StateStore.nbytes``."""
        return self.values.nbytes

    def clear(self, state: int) -> None:
        """See ``StateStore.clear``."""
        self._states[state] = 0.0

    def copy(self, source: int, target: int) -> None:
        """See ``StateStore.copy``."""
        self._states[target] = self._states[source]


def unsupported_state_space(space: StateSpace) -> str | None:
    """Return why the kernels can't run such layers, or None if they can."""
    sizes = {
        "mamba_d_head": (space.head_dim, LANES),
        "mamba_d_state": (space.state_dim, LANES),
        "the inner size": (space.inner, PANEL),
    }
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"{name} = {size} is not a multiple of {unit}"
    return None


def state_vectors(config: ModelConfig, tensor: Tensor) -> dict[str, Float32Array]:
    """Return what is multiplied number by number, layers with a state one after the other."""
    space = config.state_space
    if space is None:
        return {}

    def layers(name: str) -> list[Float32Array]:
        return [tensor(f"layers.{layer}.{name}").to_float32() for layer in space.layers]

    def by_head(parts: list[Float32Array]) -> Float32Array:
        return np.concatenate([np.pad(part, (0, -space.heads % LANES)) for part in parts])

    decays = [-np.exp(part) for part in layers("ssm.A_log")] if space.logarithmic else None
    vectors = {
        "ssm_conv": np.concatenate([part.T.reshape(-1) for part in layers("ssm_conv.weight")]),
        "ssm_dt_bias": by_head(layers("ssm.dt_bias")),
        "ssm_decay": by_head(layers("ssm.A") if decays is None else decays),
        "ssm_norm": np.concatenate(layers("ssm_norm.weight")),
    }
    if isinstance(space, StateSpace):
        vectors["ssm_skip"] = by_head(layers("ssm.D"))
        if space.conv_bias:
            vectors["ssm_conv_bias"] = np.concatenate(layers("ssm_conv.bias"))
    return {name: np.ascontiguousarray(values, np.float32) for name, values in vectors.items()}


def layer_numbers(config: ModelConfig) -> list[int]:
    """Return each layer's number among those of its kind, see ``StateWeights.numbers``."""
    space = config.state_space
    states = () if space is None else space.layers
    numbers = {layer: -1 - number for number, layer in enumerate(states)}
    numbers |= {layer: number for number, layer in enumerate(config.attention_layers)}
    return [numbers[layer] for layer in range(config.layers)]


def norms_before(config: ModelConfig, space: StateLayers, arrays: Arrays) -> Float32Array:
    """Return the weights of norms of hidden rows before layers with a state."""
    norms: Float32Array = arrays["attn_norm"].reshape(config.layers, config.hidden)
    return norms[list(space.layers)].reshape(-1)


def assemble_state_space(config: ModelConfig, space: StateSpace, arrays: Arrays) -> StateWeights:
    """Return the kernels' structure of what was packed."""
    layers, hidden = len(space.layers), config.hidden
    padded = panel_count(space.projected) * PANEL
    zeros = np.zeros(layers * max(padded, hidden, space.mixed), np.float32)

    return StateWeights(
        sizes=StateSizes(
            layers=layers,
            heads=space.heads,
            head_dim=space.head_dim,
            state_dim=space.state_dim,
            conv_width=space.conv_width,
            inner=space.inner,
            mixed=space.mixed,
            layer_floats=space.layer_floats,
            padded_heads=space.heads + -space.heads % LANES,
            stride=padded,
        ),
        numbers=np.array(layer_numbers(config), np.int32),
        before=rms_norm(config, norms_before(config, space, arrays), hidden),
        project=packed_matrix(arrays, PROJECT, space.projected, hidden, zeros),
        conv=arrays["ssm_conv"],
        conv_bias=arrays.get("ssm_conv_bias", zeros),
        dt_bias=arrays["ssm_dt_bias"],
        decay=arrays["ssm_decay"],
        skip=arrays["ssm_skip"],
        gate_norm=rms_norm(config, arrays["ssm_norm"], space.inner),
        output=packed_matrix(arrays, OUTPUT, hidden, space.inner, zeros),
    )


def state_memory(
    weights: StateWeights | DeltaWeights,
    rows: int,
    queries: int,
    floats: Callable[[str, int], Float32Array],
    activations: Callable[[str, int], Activations],
) -> StateMemory:
    """Return memory for a step.

    Args:
        weights: of the layers with a state.
        rows: of the step.
        queries: numbers that attention puts out per row.
        floats, activations: return float32 arrays or activations by name, at least so long.
    """
    sizes = weights.sizes
    return StateMemory(
        projected=floats("projected states", rows * max(sizes.stride, queries)),
        mixed=floats("mixed", rows * sizes.mixed),
        steps=floats("steps", rows * sizes.padded_heads),
        factors=floats("factors", rows * sizes.padded_heads),
        outputs=floats("state outputs", rows * sizes.inner),
        gated=activations("gated states", rows * sizes.inner),
    )
