"""Attention sinks: a learned score of each query head that takes part in the softmax, valueless.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, arXiv 2508.10925, section 2.3. Of a row whose
largest score is m, the sum of exponentials becomes sum(exp(score - m)) + exp(sink - m). This is
done once, after all of the row's keys were merged, so that it doesn't matter how they were cut.

A model with sinks has weights, and its layers' heads, of types of their own. The forward pass is
compiled for each type, so that of all other models is the code that it would be without any.
"""

from typing import Any, NamedTuple

from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.decoder_data import DecoderConfig, DecoderWeights
from midfill.kernels.cpu.jit import inlined_kernel, kernel_by_type
from midfill.kernels.cpu.linear import GateUpWeights, LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.rows import NormWeights, RopeTables
from midfill.kernels.cpu.simd import exp, first_lane, splat


class SinkHeads(NamedTuple):
    """``AttentionHeads`` of a layer with sinks.

    Attributes:
        sinks: float32, of all layers.
        first_sink: where those of the layer start.
    """

    query_heads: int
    kv_heads: int
    group: int
    head_dim: int
    scale: float
    window: int
    sinks: Float32Array
    first_sink: int


class SinkWeights(NamedTuple):
    """``DecoderWeights`` of a model with sinks.

    Attributes:
        sinks: float32 [layers * query_heads].
    """

    embed: LinearWeights
    head: LinearWeights
    qkv: LinearWeights
    o: LinearWeights
    gate_up: GateUpWeights
    down: LinearWeights
    attn_norm: NormWeights
    mlp_norm: NormWeights
    final_norm: NormWeights
    attn_post_norm: NormWeights
    mlp_post_norm: NormWeights
    q_norm: NormWeights
    k_norm: NormWeights
    rope: RopeTables
    windows: Int32Array
    sinks: Float32Array


@inlined_kernel
def _add_nothing(heads: Any, states: Float32Array, row: int, head: int) -> None:
    """Leave the row as it is."""


@inlined_kernel
def _add_sink(heads: SinkHeads, states: Float32Array, row: int, head: int) -> None:
    above = heads.sinks[heads.first_sink + head] - states[row * 2]
    states[row * 2 + 1] += first_lane(exp(splat(above)))


@kernel_by_type
def add_sink(heads: Any, *_: Any) -> Any:
    """Add a query head's sink to a row's sum of exponentials, if the layer has any.

    Arguments: (heads, ``SoftmaxSums.states``, row, query head).
    """
    return _add_sink if "sinks" in heads.fields else _add_nothing


@inlined_kernel
def _plain_heads(config: DecoderConfig, weights: DecoderWeights, layer: int) -> AttentionHeads:
    return AttentionHeads(
        config.query_heads, config.kv_heads, config.query_heads // config.kv_heads,
        config.head_dim, config.score_scale, weights.windows[layer],
    )  # fmt: skip


@inlined_kernel
def _sink_heads(config: DecoderConfig, weights: SinkWeights, layer: int) -> SinkHeads:
    return SinkHeads(
        config.query_heads, config.kv_heads, config.query_heads // config.kv_heads,
        config.head_dim, config.score_scale, weights.windows[layer], weights.sinks,
        layer * config.query_heads,
    )  # fmt: skip


@kernel_by_type
def layer_heads(config: Any, weights: Any, *_: Any) -> Any:
    """Return the heads of a layer, with its sinks if the model has any.

    Arguments: (DecoderConfig, the model's weights, layer).
    """
    return _sink_heads if "sinks" in weights.fields else _plain_heads
