"""Streams of hidden rows in the CPU kernels' form: their weights, and the memory of a step."""

import math
from collections.abc import Callable

import numpy as np

from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.altup.data import MIXING, AltUpMemory, AltUpSizes, AltUpWeights
from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.panel_products import MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.tiles import even_tile_rows
from midfill.kernels.cpu.weight_formats import PANEL, panel_count
from midfill.models.altup import STREAMS, AltUp
from midfill.models.config import ModelConfig
from midfill.runners.cpu.packed_matrices import Arrays, packed_matrix, rms_norm
from midfill.stored_tensor import StoredTensor

Tensor = Callable[[str], StoredTensor]

LAYER_MATRICES = ("laurel_left", "laurel_right", "layer_gate", "layer_out")
"""Matrices of each layer, by the names that they have in a checkpoint and under which they are
kept."""
OUTER_MATRICES = {
    "layer_embed": ("layer_embed",),
    "layer_project": ("layer_project",),
    "altup_proj": tuple(f"altup_proj.{i}" for i in range(STREAMS - 1)),
    "altup_unembed": tuple(f"altup_unembed.{i}" for i in range(STREAMS - 1)),
}
"""Those that no layer has: name under which they are kept -> one after the other."""


def unsupported_altup(config: ModelConfig, altup: AltUp) -> str | None:
    """Return why the kernels can't run a model with streams, or None if they can."""
    for name, size in (("laurel_rank", altup.laurel_rank), ("layer_width", altup.layer_width)):
        if size % PANEL:
            return f"{name} = {size} is not a multiple of {PANEL}"
    if not (config.value_norms and config.qk_norm and config.post_norms and config.gated_mlp):
        return "streams of hidden rows without norms of heads and outputs"
    if config.experts or config.latent or config.state_space or config.sinks:
        return "streams of hidden rows beside experts, sinks, latent attention or states"
    return None


def altup_vectors(config: ModelConfig, tensor: Tensor) -> dict[str, Float32Array]:
    """Return norms and what is multiplied in float32, layers one after the other."""
    if config.altup is None:
        return {}

    def of(layer: int, name: str) -> Float32Array:
        values: Float32Array = tensor(f"layers.{layer}.{name}").to_float32()
        return values

    def layers(name: str) -> Float32Array:
        return np.concatenate([of(i, name).reshape(-1) for i in range(config.layers)])

    routers = [
        of(i, "altup_router.weight")
        * (of(i, "altup_router_norm.weight") / np.float32(config.hidden))
        for i in range(config.layers)
    ]
    return {
        "altup_router": np.concatenate(routers).reshape(-1),
        "altup_predict": layers("altup_predict.weight"),
        "altup_correct": layers("altup_correct.weight"),
        "altup_scale": layers("altup.correct_output_scale"),
        "laurel_norm": layers("laurel_norm.weight"),
        "layer_norm": layers("layer_norm.weight"),
        "layer_project_norm": np.array(tensor("layer_project_norm.weight").to_float32()),
    }


def assemble_altup(config: ModelConfig, arrays: Arrays) -> AltUpWeights | None:
    """Return the kernels' structure of what was packed; None for models without streams."""
    altup = config.altup
    if altup is None:
        return None
    hidden, rank, width = config.hidden, altup.laurel_rank, altup.layer_width
    embedded = config.layers * width
    vocab = panel_count(altup.layer_vocab) * PANEL
    queries = config.query_heads * config.head_dim
    layers = max(config.layers, STREAMS)
    zeros = np.zeros(max(layers * max(hidden, rank, width, queries), vocab), np.float32)
    cutoffs = [config.gate_cutoff_of(layer) for layer in range(config.layers)]

    def matrix(name: str, outputs: int, inputs: int) -> LinearWeights:
        return packed_matrix(arrays, name, outputs, inputs, zeros)

    return AltUpWeights(
        sizes=AltUpSizes(
            hidden=hidden,
            row_width=config.row_width,
            layers=config.layers,
            owned=len(config.kv_layers),
            rank=rank,
            width=width,
            vocab=altup.layer_vocab,
            epsilon=config.norm_epsilon,
            logits_cap=config.logits_cap or 0.0,
        ),
        numbers=np.array([config.kv_layer_of(i) for i in range(config.layers)], np.int32),
        cutoffs=np.array([-math.inf if each is None else each for each in cutoffs], np.float32),
        query=query_of_sharing(config, matrix("qkv", queries, hidden)),
        value_norm=rms_norm(config, np.ones(config.head_dim, np.float32), config.head_dim),
        layer_embed=matrix("layer_embed", altup.layer_vocab, embedded),
        layer_project=matrix("layer_project", embedded, hidden),
        layer_project_norm=rms_norm(config, arrays["layer_project_norm"], width),
        spread=matrix("altup_proj", hidden, hidden),
        gather=matrix("altup_unembed", hidden, hidden),
        laurel_left=matrix("laurel_left", rank, hidden),
        laurel_right=matrix("laurel_right", hidden, rank),
        laurel_norm=rms_norm(config, arrays["laurel_norm"], hidden),
        router=arrays["altup_router"],
        predict=arrays["altup_predict"],
        correct=arrays["altup_correct"],
        scale=arrays["altup_scale"],
        layer_gate=matrix("layer_gate", width, hidden),
        layer_out=matrix("layer_out", hidden, width),
        layer_norm=rms_norm(config, arrays["layer_norm"], hidden),
    )


def query_of_sharing(config: ModelConfig, qkv: LinearWeights) -> LinearWeights:
    """Return the part of all layers' projections that is of layers without K and V of their own.

    These are the last layers, so their panels are the last ones.
    """
    return qkv._replace(panels=qkv.panels[_own_panels(config) :])


def projections_of_others(config: ModelConfig, qkv: LinearWeights) -> LinearWeights:
    """Return the other part: rows of q, k and v."""
    return qkv._replace(panels=qkv.panels[: _own_panels(config)])


def _own_panels(config: ModelConfig) -> int:
    """Return how many panels the projections of layers that keep KV have."""
    width = (config.query_heads + 2 * config.kv_heads) * config.head_dim
    return len(config.kv_layers) * (width // PANEL)


def altup_memory(
    config: ModelConfig,
    weights: AltUpWeights,
    rows: int,
    floats: Callable[[str, int], Float32Array],
    activations: Callable[[str, int], Activations],
) -> AltUpMemory:
    """Return memory for a step.

    Args:
        config: of the model.
        weights: what it has for streams.
        rows: of the step.
        floats, activations: return float32 arrays or activations by name, at least so long.
    """
    sizes = weights.sizes
    gates = rows * config.ffn if config.gate_cutoffs else 0
    return AltUpMemory(
        tiles=even_tile_rows(MAX_QUANTIZED_ROWS),
        active=floats("active", rows * sizes.hidden),
        predicted=floats("predicted", rows * STREAMS * sizes.hidden),
        laurel=floats("laurel", rows * sizes.hidden),
        mixing=floats("mixing", rows * MIXING),
        low=activations("low", rows * max(sizes.rank, sizes.width)),
        embedded=floats("embedded", rows * sizes.layers * sizes.width),
        gate=floats("cut gates", gates),
        up=floats("cut up", gates),
    )
