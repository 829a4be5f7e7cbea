"""The forward pass of a decoder whose hidden rows have several streams: one compiled call per step.

Attention, output projections, MLPs and the head are those of ``kernels.cpu.decoder``, over the
stream that layers compute with, in memory of its own. Some layers keep no KV: they attend to that
of another one. All threads share each phase; there are no blocks of rows that a thread runs by
itself.
"""

from math import sqrt
from typing import Any

import numpy as np

from midfill.kernels.cpu.activations import quantize
from midfill.kernels.cpu.altup.data import STREAMS, AltUpDecoderWeights, AltUpWorkspace
from midfill.kernels.cpu.altup.streams import (
    add_laurel,
    add_to_others,
    average_row,
    cap_logits,
    correct_row,
    cut_gates,
    gate_row,
    join_row,
    match_length,
    mix_inputs,
    predict_row,
)
from midfill.kernels.cpu.clock import (
    DOWN,
    EMBED,
    GATE_UP,
    HEAD,
    NORM,
    QKV,
    ROTATE,
    end_phase,
    start_clock,
)
from midfill.kernels.cpu.decoder import (
    _add_normed,
    _multiply,
    added_rows,
    attend_layer,
    compute_logits,
    keep_queries,
    layer_kv,
    mlp_block,
    norm_rows,
    output_block,
    tiling_of,
    touch_pages,
)
from midfill.kernels.cpu.decoder_data import Batch, DecoderConfig, Stages
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.jit import entry_point, in_child, kernel
from midfill.kernels.cpu.kv_cache import KVCache, LayerKV, write_entry
from midfill.kernels.cpu.linear import LinearOutput, LinearWeights, Tiling
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.rows import norm, rotate
from midfill.kernels.cpu.simd import LANES, load, store
from midfill.kernels.cpu.standby import (
    await_run,
    current_run,
    publish,
    published,
    running_threads,
    signature_of,
    start_workers,
)
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.tiles import DOWN_TILES, GATE_UP_TILES, QKV_TILES

_ALL_COUNT = -1e30
"""Cutoffs below it leave all gates as they are."""


@kernel
def _own_tiling(space: AltUpWorkspace, context: ThreadContext) -> Tiling:
    return Tiling(space.memory.tiles, space.decoder.products[context.thread])


@kernel
def _written(values: Float32Array, rows: int, stride: int, space: AltUpWorkspace) -> LinearOutput:
    """Return where a product goes that replaces what is there."""
    return LinearOutput(values, rows, stride, False, 1.0, space.decoder.maxima[0], False)


@kernel
def _start_rows(
    context: ThreadContext, config: DecoderConfig, weights: AltUpDecoderWeights, batch: Batch,
    hidden: Float32Array, space: AltUpWorkspace,
) -> None:  # fmt: skip
    """Fill the hidden rows: the tokens' embeddings, other streams, and what layers will add."""
    own, normed, memory = weights.altup, space.decoder.normed, space.memory
    sizes, rows = own.sizes, len(batch.token_ids)
    size, stride = sizes.hidden, sizes.row_width
    embedded = sizes.layers * sizes.width
    for row in range(context.thread, rows, context.threads):
        at, token = row * stride, batch.token_ids[row]
        embed(token, weights.decoder.embed, config.embedding_multiplier, hidden, at)
        for k in range(0, size, LANES):
            store(normed.values, row * size + k, load(hidden, at + k))
        quantize(normed, row * size, size)
        known = token if token < sizes.vocab else token * 0
        embed(known, own.layer_embed, sqrt(sizes.width), hidden, at + STREAMS * size)
    end_phase(context, EMBED)
    tiling = _own_tiling(space, context)
    out = _written(memory.embedded, rows, embedded, space)
    _multiply(context, config, normed, 0, own.layer_project, 0, out, tiling)
    end_phase(context, EMBED)
    for stream in range(1, STREAMS):
        out = _written(hidden[stream * size :], rows, stride, space)
        _multiply(context, config, normed, 0, own.spread, stream - 1, out, tiling)
        end_phase(context, EMBED)
    for row in range(context.thread, rows, context.threads):
        at = row * stride
        mix_inputs(own, hidden, row, memory.embedded)
        for stream in range(1, STREAMS):
            match_length(hidden, at, hidden, at + stream * size, size)
    end_phase(context, EMBED)


@kernel
def _norm_and_store(
    context: ThreadContext, config: DecoderConfig, weights: AltUpDecoderWeights, kv: LayerKV,
    layer: int, batch: Batch, qkv: Float32Array, space: AltUpWorkspace,
) -> None:  # fmt: skip
    """Norm and rotate queries and keys in place, norm values; write these into their slots.

    Rows of the learned residual's first half are quantised in the same phase.
    """
    decoder, own, low = weights.decoder, weights.altup, space.memory.low
    dim, heads, kv_heads = config.head_dim, config.query_heads, config.kv_heads
    cache, width, rank = kv.cache, decoder.qkv.outputs, own.sizes.rank
    for row in range(context.thread, len(batch.token_ids), context.threads):
        position, slot, start = batch.positions[row], batch.write_slots[row], row * width
        quantize(low, row * rank, rank)
        for head in range(heads):
            at = start + head * dim
            norm(qkv, at, decoder.q_norm, layer, qkv, at)
            rotate(qkv, at, decoder.rope, layer, position)
        if layer < own.sizes.owned:
            for head in range(kv_heads):
                key = start + (heads + head) * dim
                value = key + kv_heads * dim
                norm(qkv, key, decoder.k_norm, layer, qkv, key)
                rotate(qkv, key, decoder.rope, layer, position)
                norm(qkv, value, own.value_norm, 0, qkv, value)
                entry = kv.first_entry + head * kv.slots + slot
                write_entry(qkv, key, dim, cache.keys, cache.key_scales, entry)
                write_entry(qkv, value, dim, cache.values, cache.value_scales, entry)


@kernel
def _project(
    context: ThreadContext, config: DecoderConfig, weights: AltUpDecoderWeights, cache: KVCache,
    layer: int, number: int, batch: Batch, hidden: Float32Array, space: AltUpWorkspace,
) -> None:  # fmt: skip
    """Predict the streams; compute queries, keys and values, and the learned residual."""
    decoder, own, workspace, memory = weights.decoder, weights.altup, space.decoder, space.memory
    rows, size, rank = len(batch.token_ids), own.sizes.hidden, own.sizes.rank
    for row in range(context.thread, rows, context.threads):
        predict_row(own, layer, hidden, row, memory)
    end_phase(context, NORM)
    normed = workspace.normed
    start = norm_rows(context, memory.active, rows, decoder.attn_norm, layer, normed)
    out = _written(workspace.qkv, rows, decoder.qkv.outputs, space)
    tiling = tiling_of(workspace, context, QKV_TILES)
    if layer < own.sizes.owned:
        _multiply(context, config, normed, start, decoder.qkv, layer, out, tiling)
    else:
        _multiply(context, config, normed, start, own.query, layer - own.sizes.owned, out, tiling)
    end_phase(context, QKV)
    tiling = _own_tiling(space, context)
    out = _written(memory.low.values, rows, rank, space)
    _multiply(context, config, normed, start, own.laurel_left, layer, out, tiling)
    end_phase(context, ROTATE)
    kv = layer_kv(config, cache, number)
    _norm_and_store(context, config, weights, kv, layer, batch, workspace.qkv, space)
    end_phase(context, ROTATE)
    out = _written(memory.laurel, rows, size, space)
    _multiply(context, config, memory.low, 0, own.laurel_right, layer, out, tiling)
    end_phase(context, ROTATE)
    for row in range(context.thread, rows, context.threads):
        add_laurel(own, layer, normed.values, start + row * size, row, memory)
    keep_queries(
        context, config, layer, batch, workspace.qkv, decoder.qkv.outputs, workspace.observed
    )
    end_phase(context, NORM)


@kernel
def _multiply_all(
    context: ThreadContext, config: DecoderConfig, start: int, weights: LinearWeights, layer: int,
    values: Float32Array, rows: int, space: AltUpWorkspace,
) -> None:  # fmt: skip
    """Multiply normed rows by a matrix of an MLP's first half."""
    out = _written(values, rows, weights.outputs, space)
    tiling = tiling_of(space.decoder, context, GATE_UP_TILES)
    _multiply(context, config, space.decoder.normed, start, weights, layer, out, tiling)
    end_phase(context, GATE_UP)


@kernel
def _cut_mlp(
    context: ThreadContext, config: DecoderConfig, weights: AltUpDecoderWeights, layer: int,
    rows: int, space: AltUpWorkspace,
) -> None:  # fmt: skip
    """active += norm(MLP(norm(active))), where only gates above the cutoff count."""
    decoder, workspace, memory = weights.decoder, space.decoder, space.memory
    gate_up, active = decoder.gate_up, memory.active
    start = norm_rows(context, active, rows, decoder.mlp_norm, layer, workspace.normed)
    _multiply_all(context, config, start, gate_up.gate, layer, memory.gate, rows, space)
    _multiply_all(context, config, start, gate_up.up, layer, memory.up, rows, space)
    cutoff = weights.altup.cutoffs[layer]
    for row in range(context.thread, rows, context.threads):
        cut_gates(cutoff, gate_up.activation, gate_up.up.outputs, row, memory, workspace.gated)
    end_phase(context, GATE_UP)
    out = added_rows(config, active, rows, workspace)
    tiling = tiling_of(workspace, context, DOWN_TILES)
    _multiply(context, config, workspace.gated, 0, decoder.down, layer, out, tiling)
    end_phase(context, DOWN)
    _add_normed(context, config, decoder.mlp_post_norm, layer, active, rows, workspace)


@kernel
def _correct(
    context: ThreadContext, config: DecoderConfig, weights: AltUpDecoderWeights, layer: int,
    rows: int, hidden: Float32Array, space: AltUpWorkspace,
) -> None:  # fmt: skip
    """Correct the streams by what the layer computed, and add what is the token's own."""
    own, workspace, memory = weights.altup, space.decoder, space.memory
    kind, tiling = weights.decoder.gate_up.activation, _own_tiling(space, context)
    for row in range(context.thread, rows, context.threads):
        correct_row(own, layer, hidden, row, memory, workspace.normed)
    end_phase(context, NORM)
    out = _written(memory.low.values, rows, own.sizes.width, space)
    _multiply(context, config, workspace.normed, 0, own.layer_gate, layer, out, tiling)
    end_phase(context, NORM)
    for row in range(context.thread, rows, context.threads):
        gate_row(own, layer, kind, hidden, row, memory.low)
    end_phase(context, NORM)
    out = _written(workspace.projected, rows, own.sizes.hidden, space)
    _multiply(context, config, memory.low, 0, own.layer_out, layer, out, tiling)
    end_phase(context, NORM)
    for row in range(context.thread, rows, context.threads):
        add_to_others(own, layer, hidden, row, workspace.projected)
    end_phase(context, NORM)


@kernel
def _finish_rows(
    context: ThreadContext, config: DecoderConfig, weights: AltUpDecoderWeights, batch: Batch,
    hidden: Float32Array, space: AltUpWorkspace,
) -> None:  # fmt: skip
    """Compute the average of the streams of the rows whose logits are wanted."""
    own, normed, memory = weights.altup, space.decoder.normed, space.memory
    size, stride, outputs = own.sizes.hidden, own.sizes.row_width, len(batch.logit_rows)
    for stream in range(1, STREAMS):
        for i in range(context.thread, outputs, context.threads):
            at = batch.logit_rows[i] * stride + stream * size
            for k in range(0, size, LANES):
                store(normed.values, i * size + k, load(hidden, at + k))
            quantize(normed, i * size, size)
        end_phase(context, HEAD)
        out = _written(memory.predicted[(stream - 1) * outputs * size :], outputs, size, space)
        tiling = _own_tiling(space, context)
        _multiply(context, config, normed, 0, own.gather, stream - 1, out, tiling)
        end_phase(context, HEAD)
    for i in range(context.thread, outputs, context.threads):
        row = batch.logit_rows[i]
        average_row(
            size, hidden, row * stride, memory.predicted, i * size, outputs * size, memory.active,
            row * size,
        )  # fmt: skip
    end_phase(context, HEAD)


@kernel
def _cap(
    context: ThreadContext, weights: AltUpDecoderWeights, outputs: int, logits: Float32Array
) -> None:
    """Cap all logits, each thread a part of each row."""
    cap, width = weights.altup.sizes.logits_cap, len(weights.decoder.head.bias)
    if cap == 0.0:
        return
    lanes = width // LANES
    first = lanes * context.thread // context.threads * LANES
    end = lanes * (context.thread + 1) // context.threads * LANES
    for i in range(outputs):
        cap_logits(logits, i * width + first, i * width + end, cap)
    end_phase(context, HEAD)


@kernel
def _forward_streams(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig,
    weights: AltUpDecoderWeights, cache: KVCache, batch: Batch, hidden: Float32Array,
    space: AltUpWorkspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass, see ``forward_streams``."""
    workspace, decoder, memory = space.decoder, weights.decoder, space.memory
    context = ThreadContext(thread, threads, sync, workspace.clock)
    start_clock(workspace.clock, thread)
    rows = len(batch.token_ids)
    if stages.embed:
        if threads > 1 and stages.end_layer > 0:
            touch_pages(context, config, cache, batch.write_slots, 0, config.layers)
        _start_rows(context, config, weights, batch, hidden, space)
    for layer in range(stages.first_layer, stages.end_layer):
        number: Any = np.int64(weights.altup.numbers[layer])
        _project(context, config, weights, cache, layer, number, batch, hidden, space)
        attend_layer(context, config, decoder, cache, number, batch, workspace, stages.attend_parts)
        output_block(context, config, decoder, layer, rows, memory.active, workspace)
        for row in range(thread, rows, threads):
            join_row(config.hidden, row, memory)
        end_phase(context, NORM)
        if weights.altup.cutoffs[layer] < _ALL_COUNT:
            mlp_block(context, config, decoder, layer, rows, memory.active, workspace)
        else:
            _cut_mlp(context, config, weights, layer, rows, space)
        _correct(context, config, weights, layer, rows, hidden, space)
    outputs = len(batch.logit_rows)
    if stages.logits and outputs > 0:
        _finish_rows(context, config, weights, batch, hidden, space)
        compute_logits(context, config, decoder, batch, memory.active, workspace)
        _cap(context, weights, outputs, workspace.logits)


@in_child
@entry_point
def forward_streams(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig,
    weights: AltUpDecoderWeights, cache: KVCache, batch: Batch, hidden: Float32Array,
    space: AltUpWorkspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass over a batch, on one of ``threads`` threads.

    Args:
        thread, threads, sync: see ThreadPool.run_on_standby.
        config: the model; its layers are those that keep KV.
        weights: of the model.
        cache: K and V of all slots in layers that keep them; those of the batch's rows are written.
        batch: the step. It must not stop between a layer's projections and its attention.
        hidden: float32 [rows * row_width], updated in place.
        space: large enough for the batch; takes the logits.
        stages: what to run.
    """
    arguments = (config, weights, cache, batch, hidden, space, stages)
    signature = signature_of(arguments)
    if thread == 0:
        publish(sync, arguments)
        if start_workers(sync, threads, signature):
            _forward_streams(thread, threads, sync, *arguments)
        return
    running = True
    while running:
        run = current_run(sync)
        _forward_streams(thread, running_threads(sync), sync, *arguments)
        running = await_run(sync, thread, run, signature)
        if running:
            arguments = published(sync, arguments)
