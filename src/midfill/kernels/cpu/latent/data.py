"""What the forward pass of latent attention takes beside what every decoder does."""

from typing import NamedTuple

from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.decoder_data import DecoderWeights, Workspace
from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Uint8Array
from midfill.kernels.cpu.rows import NormWeights

UNIT_ROWS = 32
"""Maximum rows that a thread multiplies by one head's matrix at a time."""


class LatentSizes(NamedTuple):
    """Numbers of ``models.config.LatentAttention``; ``rank`` and ``rotary_dim`` in 64s."""

    query_rank: int
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


class LatentWeights(NamedTuple):
    """The latent attention of all layers.

    Attributes:
        sizes: of a layer.
        project: rows of q, or of the queries' latent, and below them the latent of keys and values
            and the rotated part of keys; of hidden rows.
        query_norm: of the queries' latent; without weights where there is none.
        query: rows of q, of that latent; without panels where there is none.
        key_norm: of the latent of keys and values.
        absorb: W_UK, transposed: [layers * query_heads * rank, plain_dim].
        expand: W_UV: [layers * query_heads * value_dim, rank].
    """

    sizes: LatentSizes
    project: LinearWeights
    query_norm: NormWeights
    query: LinearWeights
    key_norm: NormWeights
    absorb: LinearWeights
    expand: LinearWeights


class LatentMemory(NamedTuple):
    """Memory of a step; all arrays are flat.

    Attributes:
        tiles: uint8 [49], see tiles.py: of products with ``absorb`` and ``expand``.
        projected: float32 [rows * project.outputs].
        query_latents: [rows, query_rank], normed.
        queries: float32 [rows * query_heads * (plain_dim + rotary_dim)], where they have a latent.
        keys: float32 [rows * key_dim].
        gathered: [threads * UNIT_ROWS, the larger of plain_dim and rank], of each thread's own.
        expanded: [rows, query_heads * value_dim].
    """

    tiles: Uint8Array
    projected: Float32Array
    query_latents: Activations
    queries: Float32Array
    keys: Float32Array
    gathered: Activations
    expanded: Activations


class LatentDecoderWeights(NamedTuple):
    """All weights. Of ``decoder.qkv`` there are only sizes: those of the absorbed queries."""

    decoder: DecoderWeights
    latent: LatentWeights


class LatentWorkspace(NamedTuple):
    """Memory of a step; the absorbed queries lie in ``decoder.qkv``."""

    decoder: Workspace
    latent: LatentMemory
