"""Memory of a step for mixtures of experts, and the table through which the kernel finds it."""

from collections.abc import Callable

import numpy as np

from midfill.kernels.cpu.activations import ACTIVATION_BLOCK_BYTES, Activations
from midfill.kernels.cpu.experts.table import (
    MAX_MIXED_ROWS,
    SCRATCH_PANELS,
    ExpertMemory,
    ExpertSizes,
    ExpertWeights,
    make_table,
)
from midfill.kernels.cpu.linear import MAX_TILE_ROWS
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array, Uint8Array
from midfill.kernels.cpu.tiles import even_tile_rows
from midfill.kernels.cpu.weight_formats import GROUP, PANEL, WeightFormat
from midfill.models.config import Experts, ModelConfig
from midfill.system.files import madvise_address


def gated_width(config: ModelConfig) -> int:
    """Return the inner size of the widest MLP that all rows of a step run through."""
    shared = 0 if config.experts is None else config.experts.shared_ffn
    return max(config.ffn if len(config.expert_layers) < config.layers else 0, shared)


def expert_memory(
    config: ModelConfig,
    experts: Experts,
    weights: ExpertWeights,
    rows: int,
    threads: int,
    floats: Callable[[str, int], Float32Array],
    numbers: Callable[[str, int], Uint8Array],
) -> ExpertMemory:
    """Return memory for a step of so many rows, or for as many of them as are mixed at a time.

    Args:
        config: of the model.
        experts: its mixtures.
        weights: the experts' weights.
        rows: of the step.
        threads: that it runs on.
        floats, numbers: return a float32 or uint8 array by name, at least so long.
    """
    rows = min(rows, MAX_MIXED_ROWS)
    pairs, hidden, layers = rows * experts.per_token, config.hidden, len(config.expert_layers)

    def integers(size: int) -> Int32Array:
        return np.zeros(size, np.int32)

    def activations(name: str, size: int, reader_formats: set[WeightFormat]) -> Activations:
        exact = WeightFormat.F32 in reader_formats
        blocks = size // GROUP * ACTIVATION_BLOCK_BYTES
        return Activations(
            floats(name, size if exact else 0),
            numbers(f"{name} blocks", blocks if reader_formats != {WeightFormat.F32} else 0),
        )

    return ExpertMemory(
        router_tiles=even_tile_rows(MAX_TILE_ROWS),
        zeros=np.zeros(
            max(
                layers * max(experts.shared_ffn, hidden, weights.router.outputs),
                SCRATCH_PANELS * 2 * PANEL,
            ),
            np.float32,
        ),
        scores=floats("expert scores", rows * weights.router.outputs),
        preferred=floats(
            "preferred experts",
            rows * weights.router.outputs if experts.corrected or experts.groups > 1 else 0,
        ),
        chosen=integers(pairs),
        weights=np.zeros(rows * (experts.per_token + 1), np.float32),
        places=integers(pairs),
        ordered_rows=integers(pairs),
        starts=integers(experts.count + 1),
        cursors=integers(experts.count),
        active=integers(experts.count + 1),
        gathered=activations("gathered", pairs * hidden, weights.gate_up.formats),
        opened=activations("opened", pairs * experts.ffn, weights.down.formats),
        expanded=floats("expanded", pairs * hidden),
        shared=floats("shared", rows * hidden if experts.shared_ffn else 0),
        scratch=floats("expert products", threads * SCRATCH_PANELS * 2 * PANEL),
    )


def expert_table(
    config: ModelConfig,
    weights: ExpertWeights,
    memory: ExpertMemory,
    activation: int,
    linear: int,
    *,
    on_disk: bool = False,
) -> Int64Array:
    """Return the kernel's table.

    Args:
        config: of the model.
        weights, memory: of its mixtures.
        activation: of experts, see ``ExpertSizes``.
        linear: address of the kernel for products with experts, see ``ExpertSizes``.
        on_disk: whether the experts' matrices are in a mapped file.
    """
    experts = config.experts
    assert experts is not None
    sizes = ExpertSizes(
        experts.count, experts.per_token, int(experts.normalised), experts.ffn, experts.shared_ffn,
        activation, int(experts.shared_gated), int(experts.scoring == "sigmoid"),
        int(experts.corrected), experts.groups, experts.groups_per_token,
        int(len(weights.down.bias) > 0), linear, madvise_address() if on_disk else 0,
    )  # fmt: skip
    numbers = {layer: number for number, layer in enumerate(config.expert_layers)}
    return make_table(
        sizes, weights, memory, [numbers.get(layer, -1) for layer in range(config.layers)]
    )
