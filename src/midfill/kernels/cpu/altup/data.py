"""What the forward pass of models with streams of hidden rows takes beside what every decoder does.

See ``models.altup.AltUp`` for the equations.
"""

from typing import NamedTuple

from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.decoder_data import DecoderWeights, Workspace
from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Uint8Array
from midfill.kernels.cpu.rows import NormWeights

STREAMS = 4
MIXING = STREAMS + STREAMS * STREAMS
"""Numbers that a row's streams are mixed by: r(x), then P."""


class AltUpSizes(NamedTuple):
    """Numbers of ``models.altup.AltUp``, and what follows from them.

    Attributes:
        hidden: of one stream.
        row_width: of a hidden row: four streams, and what all layers add.
        layers: of the model.
        owned: the first layers, which keep KV; the others attend to theirs.
        rank, width: of the learned residual, and of what a layer adds.
        vocab: tokens that have embeddings for layers.
        epsilon: of the router's norms.
        logits_cap: logits are cap * tanh(logits / cap); 0 where they aren't capped.
    """

    hidden: int
    row_width: int
    layers: int
    owned: int
    rank: int
    width: int
    vocab: int
    epsilon: float
    logits_cap: float


class AltUpWeights(NamedTuple):
    """What such a model has beside what every decoder has.

    Attributes:
        sizes: see above.
        numbers: int32 [layers], where the KV that each layer attends to is.
        cutoffs: float32 [layers], see ``ModelConfig.gate_cutoffs``; -inf where all gates count.
        query: rows of q of the layers that keep no KV.
        value_norm: of each value head, with weights of 1.
        layer_embed: tokens' embeddings for all layers, [vocab, layers * width].
        layer_project: W_e, of all layers below each other: [layers * width, hidden].
        layer_project_norm: of each layer's part.
        spread, gather: of each stream but the first, as if they were layers: [hidden, hidden].
        laurel_left, laurel_right, laurel_norm: of the learned residual.
        router: float32 [layers * 4 * hidden], R times its norm's weights, divided by hidden.
        predict: float32 [layers * 16 * 4], W_P.
        correct: float32 [layers * 4 * 4], W_C.
        scale: float32 [layers * hidden].
        layer_gate, layer_out, layer_norm: of what a layer adds.
    """

    sizes: AltUpSizes
    numbers: Int32Array
    cutoffs: Float32Array
    query: LinearWeights
    value_norm: NormWeights
    layer_embed: LinearWeights
    layer_project: LinearWeights
    layer_project_norm: NormWeights
    spread: LinearWeights
    gather: LinearWeights
    laurel_left: LinearWeights
    laurel_right: LinearWeights
    laurel_norm: NormWeights
    router: Float32Array
    predict: Float32Array
    correct: Float32Array
    scale: Float32Array
    layer_gate: LinearWeights
    layer_out: LinearWeights
    layer_norm: NormWeights


class AltUpMemory(NamedTuple):
    """Memory of a step; all arrays are flat.

    Attributes:
        tiles: uint8 [49], see tiles.py: of products with these weights.
        active: float32 [rows * hidden], the stream that a layer computes with.
        predicted: float32 [rows * 4 * hidden], p of all streams.
        laurel: float32 [rows * hidden], the learned residual.
        mixing: float32 [rows * MIXING].
        low: [rows, the larger of rank and width].
        embedded: float32 [rows * layers * width].
        gate, up: float32 [rows * ffn] where some gates don't count, else empty.
    """

    tiles: Uint8Array
    active: Float32Array
    predicted: Float32Array
    laurel: Float32Array
    mixing: Float32Array
    low: Activations
    embedded: Float32Array
    gate: Float32Array
    up: Float32Array


class AltUpDecoderWeights(NamedTuple):
    """All weights. ``decoder.qkv`` is of the layers that keep KV."""

    decoder: DecoderWeights
    altup: AltUpWeights


class AltUpWorkspace(NamedTuple):
    """Memory of a step."""

    decoder: Workspace
    memory: AltUpMemory
