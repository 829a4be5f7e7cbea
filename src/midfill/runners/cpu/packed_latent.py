"""Latent attention in the CPU kernels' form: which matrices are packed, and the memory of a step.

W_UV keeps its stored bits. W_UK is needed transposed. New GGUF files have it so; where a file
doesn't, it is packed in float32, unless all matrices are to be rounded: blocks of quantised weights
can't be transposed.
"""

from collections.abc import Callable

import numpy as np

from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.latent.data import (
    UNIT_ROWS,
    LatentMemory,
    LatentSizes,
    LatentWeights,
)
from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.panel_products import MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.tiles import even_tile_rows
from midfill.models.config import LatentAttention, ModelConfig
from midfill.runners.cpu.packed_matrices import NOTHING, Arrays, packed_matrix, rms_norm
from midfill.stored_tensor import StoredTensor

Tensor = Callable[[str], StoredTensor]

ABSORB, EXPAND, QUERY = "absorb", "expand", "query"


def unsupported_latent(latent: LatentAttention) -> str | None:
    """Return why the kernels can't run a latent attention, or None if they can."""
    sizes = {
        "q_lora_rank": (latent.query_rank, 32),
        "kv_lora_rank": (latent.rank, 64),
        "qk_nope_head_dim": (latent.plain_dim, 32),
        "qk_rope_head_dim": (latent.rotary_dim, 64),
        "v_head_dim": (latent.value_dim, 32),
    }
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"{name} = {size} is not a multiple of {unit}"
    return None


def head_tensors(config: ModelConfig, tensor: Tensor) -> dict[str, list[list[StoredTensor]]]:
    """Return what is multiplied head by head, of each layer, by the name it is kept under."""
    latent, layers = config.latent, range(config.layers)
    if latent is None:
        return {}
    if latent.stored_apart:
        return {
            ABSORB: [[tensor(f"layers.{layer}.k_b.weight")] for layer in layers],
            EXPAND: [[tensor(f"layers.{layer}.v_b.weight")] for layer in layers],
        }
    both = [tensor(f"layers.{layer}.kv_b.weight") for layer in layers]
    return {
        ABSORB: [[_absorbing(latent, each)] for each in both],
        EXPAND: [[_expanding(latent, each)] for each in both],
    }


def _absorbing(latent: LatentAttention, both: StoredTensor) -> StoredTensor:
    """Return W_UK of each head, transposed, one below the other, in float32."""
    heads = both.to_float32().reshape(-1, latent.plain_dim + latent.value_dim, latent.rank)
    transposed = heads[:, : latent.plain_dim].swapaxes(1, 2)
    values: Float32Array = np.ascontiguousarray(transposed).reshape(-1, latent.plain_dim)
    return StoredTensor(both.name, values.shape, "f32", values)


def _expanding(latent: LatentAttention, both: StoredTensor) -> StoredTensor:
    """Return W_UV of each head, one below the other, as it is stored."""
    heads = both.data.reshape(-1, latent.plain_dim + latent.value_dim, both.data.shape[-1])
    rows = np.ascontiguousarray(heads[:, latent.plain_dim :]).reshape(-1, heads.shape[-1])
    return StoredTensor(both.name, (len(rows), latent.rank), both.kind, rows)


def latent_norms(config: ModelConfig, tensor: Tensor) -> dict[str, Float32Array]:
    """Return the norms of latents, layers one after the other."""
    latent = config.latent
    if latent is None:
        return {}

    def layers(name: str) -> Float32Array:
        parts = [tensor(f"layers.{i}.{name}.weight").to_float32() for i in range(config.layers)]
        return np.concatenate(parts)

    queries = {"q_a_norm": layers("q_a_norm")} if latent.query_rank else {}
    return queries | {"kv_a_norm": layers("kv_a_norm")}


def assemble_latent(config: ModelConfig, arrays: Arrays) -> LatentWeights | None:
    """Return the kernels' structure of what was packed; None for models without latents."""
    latent = config.latent
    if latent is None:
        return None
    heads, hidden = config.query_heads, config.hidden
    queries = heads * latent.query_dim
    projected = (latent.query_rank or queries) + latent.key_dim
    zeros = np.zeros(config.layers * max(projected, queries, heads * latent.rank), np.float32)

    def matrix(name: str, outputs: int, inputs: int) -> LinearWeights:
        return packed_matrix(arrays, name, outputs, inputs, zeros)

    return LatentWeights(
        sizes=LatentSizes(
            latent.query_rank, latent.rank, latent.plain_dim, latent.rotary_dim, latent.value_dim
        ),
        project=matrix("qkv", projected, hidden),
        query_norm=rms_norm(config, arrays.get("q_a_norm", NOTHING), latent.query_rank),
        query=matrix(QUERY, queries, latent.query_rank),
        key_norm=rms_norm(config, arrays["kv_a_norm"], latent.rank),
        absorb=matrix(ABSORB, heads * latent.rank, latent.plain_dim),
        expand=matrix(EXPAND, heads * latent.value_dim, latent.rank),
    )


def latent_memory(
    config: ModelConfig,
    weights: LatentWeights,
    rows: int,
    threads: int,
    floats: Callable[[str, int], Float32Array],
    activations: Callable[[str, int], Activations],
) -> LatentMemory:
    """Return memory for a step.

    Args:
        config: of the model.
        weights: of its latent attention.
        rows: of the step.
        threads: that it runs on.
        floats, activations: return float32 arrays or activations by name, at least so long.
    """
    sizes = weights.sizes
    has_latent = sizes.query_rank > 0
    return LatentMemory(
        tiles=even_tile_rows(MAX_QUANTIZED_ROWS),
        projected=floats("projected latents", rows * weights.project.outputs),
        query_latents=activations("query latents", rows * sizes.query_rank),
        queries=floats("queries", rows * weights.query.outputs if has_latent else 0),
        keys=floats("keys", rows * config.head_dim),
        gathered=activations("heads' rows", threads * UNIT_ROWS * max(sizes.plain_dim, sizes.rank)),
        expanded=activations("expanded", rows * config.query_heads * sizes.value_dim),
    )
