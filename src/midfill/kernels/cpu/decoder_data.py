"""What the decoder's kernels take: the model, a batch, memory for a step, and what to run of it."""

from typing import NamedTuple

from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.attention_metadata import AttentionMetadata
from midfill.kernels.cpu.attention_parts import AttentionParts
from midfill.kernels.cpu.linear import GateUpWeights, LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array, Uint8Array
from midfill.kernels.cpu.rows import NormWeights, RopeTables
from midfill.kernels.cpu.softmax import SoftmaxSums


class DecoderConfig(NamedTuple):
    """ModelConfig as the kernels see it: numbers and switches only.

    Attributes:
        qk_norm: whether each head of a query and of a key is normed.
        joint_qk_norm: whether all heads of a query are normed together, and all of a key.
        linear, gated_linear: addresses of these kernels (calls.py).
        mix_experts: address of that kernel; 0 where no layer has a mixture of experts.
    """

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    joint_qk_norm: bool
    post_norms: bool
    score_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_multiplier: float
    linear: int = 0
    gated_linear: int = 0
    mix_experts: int = 0


class DecoderWeights(NamedTuple):
    """All weights; each entry holds those of all layers.

    Attributes:
        embed, head: [vocab, hidden]; ``packed`` is one array where embeddings are tied.
        qkv: rows of q, k and v, one below the other.
        o: attention's output projection.
        gate_up, down: the MLP.
        attn_norm, mlp_norm: before attention and before the MLP.
        final_norm: before the head.
        attn_post_norm, mlp_post_norm: of what attention and the MLP add to the hidden rows; used
            where config.post_norms.
        q_norm, k_norm: of each head, used where config.qk_norm; of all heads together where
            config.joint_qk_norm.
        rope: angles of every position.
        windows: int32 [layers], keys that a query sees; 0 is all.
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


class Batch(NamedTuple):
    """A ForwardBatch as the kernels see it.

    Attributes:
        token_ids, positions, write_slots: int32 [rows].
        logit_rows: int32 [outputs], the rows whose logits are wanted.
        observed_rows: int32 [n], the rows whose queries are kept.
        attention: which rows attend to which slots.
        parts: requests whose rows attend to more than their slots, or to listed keys.
    """

    token_ids: Int32Array
    positions: Int32Array
    write_slots: Int32Array
    logit_rows: Int32Array
    observed_rows: Int32Array
    attention: AttentionMetadata
    parts: AttentionParts


class Workspace(NamedTuple):
    """Memory of a step, reused by the next one; all arrays but six are flat.

    Attributes:
        normed: [rows, hidden]; one part per thread where every thread norms all rows.
        qkv: float32 [rows * (query_heads + 2 * kv_heads) * head_dim].
        attended: [rows, query_heads * head_dim].
        gated: [rows, ffn]; without values where ``down`` has no float32 weights.
        projected: float32 [rows * hidden] where config.post_norms, else empty.
        logits: float32 [outputs * vocab padded to whole panels].
        maxima: float32 [threads, outputs * 48], see argmax.py.
        argmax: int32 [outputs], the token of each output's largest logit; -1 where one of them
            isn't finite.
        products: float32 [threads, PRODUCTS_SIZE], see linear.Tiling.
        attention: float32 [threads, attention.scratch_size(...)].
        cells: int32 [threads, 2 * 256], see attention.attend.
        observed: float32 [layers * n * query_heads * head_dim], rotated queries of the batch's
            observed rows.
        partials: attention.partial_rows(...) rows.
        clock: int64 [threads, 16], see clock.py.
        tile_rows: uint8 [matrices, 49], see tiles.py.
        alone: int64 [threads, ALONE_SYNC], see row_blocks.py.
        experts: int64: what mixtures of experts take, see experts/table.py; empty without them.
    """

    normed: Activations
    qkv: Float32Array
    attended: Activations
    gated: Activations
    projected: Float32Array
    logits: Float32Array
    maxima: Float32Array
    argmax: Int32Array
    products: Float32Array
    attention: Float32Array
    cells: Int32Array
    observed: Float32Array
    partials: SoftmaxSums
    clock: Int64Array
    tile_rows: Uint8Array
    alone: Int64Array
    experts: Int64Array


class Stages(NamedTuple):
    """The part of the forward pass that a call runs, in this order.

    A pass may stop between a layer's projections and its attention: the layer's queries, keys and
    values stay in the workspace until a call that continues there.

    Attributes:
        embed: fill the hidden rows with the tokens' embeddings.
        first_layer, end_layer: run layers first_layer <= i < end_layer.
        logits: compute the logits of the rows that want them.
        projected: the first layer's queries, keys and values are there: the last call stopped
            after them.
        project: also compute those of layer end_layer, and stop before its attention.
        attend_parts: address of the kernel for the batch's ``parts`` (calls.py); 0: it has none.
    """

    embed: bool
    first_layer: int
    end_layer: int
    logits: bool
    projected: bool = False
    project: bool = False
    attend_parts: int = 0
