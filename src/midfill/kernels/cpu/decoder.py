"""The forward pass of a decoder on the CPU: one compiled call per step.

``forward`` runs on every thread of the pool. It runs any part of the pass (``Stages``) over hidden
rows that the caller owns. So a method may stop between layers, look at the rows or drop some, and
continue; the usual step is one call for the whole pass.
"""

from typing import NamedTuple

import numpy as np

from midfill.kernels.cpu.activations import Activations, quantize
from midfill.kernels.cpu.argmax import finish_argmax, start_argmax
from midfill.kernels.cpu.attention import Queries, attend, merge_partials
from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.clock import (
    ATTENTION,
    DOWN,
    EMBED,
    GATE_UP,
    HEAD,
    NORM,
    OUTPUT,
    QKV,
    ROTATE,
    end_phase,
    lap,
    start_clock,
)
from midfill.kernels.cpu.decoder_data import Batch, DecoderConfig, DecoderWeights, Stages, Workspace
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.jit import entry_point, in_child, kernel
from midfill.kernels.cpu.kv_cache import (
    KVCache,
    LayerKV,
    entry_count,
    touch_page,
    write_entry,
)
from midfill.kernels.cpu.linear import LinearOutput, LinearWeights, Tiling
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array
from midfill.kernels.cpu.row_blocks import alone, batch_part, count_blocks, workspace_part
from midfill.kernels.cpu.rows import NormWeights, norm, rotate
from midfill.kernels.cpu.sinks import layer_heads
from midfill.kernels.cpu.standby import (
    await_run,
    current_run,
    publish,
    published,
    running_threads,
    signature_of,
    start_workers,
)
from midfill.kernels.cpu.thread_pool import ThreadContext, take_work
from midfill.kernels.cpu.tiles import (
    DOWN_TILES,
    GATE_UP_TILES,
    HEAD_TILES,
    OUTPUT_TILES,
    QKV_TILES,
)

MAX_SOLO_ROWS = 4
"""Up to this many rows, every thread norms all of them itself: cheaper than a barrier."""


class Part(NamedTuple):
    """What to compute between two attentions: a layer's end, and the next one's start."""

    output: bool
    mlp: bool
    project: bool


@kernel
def tiling_of(workspace: Workspace, context: ThreadContext, matrix: int) -> Tiling:
    return Tiling(workspace.tile_rows[matrix], workspace.products[context.thread])


@kernel
def _multiply(
    context: ThreadContext, config: DecoderConfig, x: Activations, x_at: int,
    weights: LinearWeights, layer: int, out: LinearOutput, tiling: Tiling,
) -> None:  # fmt: skip
    """Call ``linear``."""
    call_kernel(config.linear, (context, x, x_at, weights, layer, out, tiling))


@kernel
def norm_rows(
    context: ThreadContext, hidden: Float32Array, rows: int, weights: NormWeights, layer: int,
    normed: Activations,
) -> int:  # fmt: skip
    """Norm and quantise all hidden rows; return where in ``normed`` this thread finds them."""
    width = weights.size
    if rows <= MAX_SOLO_ROWS:
        start = context.thread * rows * width
        for row in range(rows):
            norm(hidden, row * width, weights, layer, normed.values, start + row * width)
            quantize(normed, start + row * width, width)
        lap(context.clock, context.thread, NORM)
        return start
    for row in range(context.thread, rows, context.threads):
        norm(hidden, row * width, weights, layer, normed.values, row * width)
        quantize(normed, row * width, width)
    end_phase(context, NORM)
    return 0


@kernel
def added_rows(
    config: DecoderConfig, hidden: Float32Array, rows: int, workspace: Workspace
) -> LinearOutput:
    """Return where a projection goes: it is added to the hidden rows, or normed before that."""
    width, maxima = config.hidden, workspace.maxima[0]
    if config.post_norms:
        return LinearOutput(workspace.projected, rows, width, False, 1.0, maxima, False)
    return LinearOutput(hidden, rows, width, True, config.residual_multiplier, maxima, False)


@kernel
def _add_normed(
    context: ThreadContext, config: DecoderConfig, weights: NormWeights, layer: int,
    hidden: Float32Array, rows: int, workspace: Workspace,
) -> None:  # fmt: skip
    """hidden += norm(projected)."""
    width, projected = config.hidden, workspace.projected
    multiplier = np.float32(config.residual_multiplier)
    for row in range(context.thread, rows, context.threads):
        at = row * width
        norm(projected, at, weights, layer, projected, at)
        for k in range(at, at + width):
            hidden[k] += projected[k] * multiplier
    end_phase(context, NORM)


@kernel
def _rotate_and_store(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, kv: LayerKV,
    layer: int, batch: Batch, qkv: Float32Array,
) -> None:  # fmt: skip
    """Norm and rotate queries and keys in place; write keys and values into their slots."""
    dim, heads, kv_heads = config.head_dim, config.query_heads, config.kv_heads
    cache = kv.cache
    width = (heads + 2 * kv_heads) * dim
    for row in range(context.thread, len(batch.token_ids), context.threads):
        position, slot = batch.positions[row], batch.write_slots[row]
        start = row * width
        if config.joint_qk_norm:
            norm(qkv, start, weights.q_norm, layer, qkv, start)
            norm(qkv, start + heads * dim, weights.k_norm, layer, qkv, start + heads * dim)
        for head in range(heads):
            at = start + head * dim
            if config.qk_norm:
                norm(qkv, at, weights.q_norm, layer, qkv, at)
            rotate(qkv, at, weights.rope, layer, position)
        keys = start + heads * dim
        values = keys + kv_heads * dim
        for head in range(kv_heads):
            at = keys + head * dim
            if config.qk_norm:
                norm(qkv, at, weights.k_norm, layer, qkv, at)
            rotate(qkv, at, weights.rope, layer, position)
            entry = kv.first_entry + head * kv.slots + slot
            write_entry(qkv, at, dim, cache.keys, cache.key_scales, entry)
            write_entry(qkv, values + head * dim, dim, cache.values, cache.value_scales, entry)


@kernel
def keep_queries(
    context: ThreadContext, config: DecoderConfig, layer: int, batch: Batch, qkv: Float32Array,
    stride: int, observed: Float32Array,
) -> None:  # fmt: skip
    """Copy the rotated queries of the observed rows."""
    size, count = config.query_heads * config.head_dim, len(batch.observed_rows)
    for i in range(context.thread, count, context.threads):
        start, to = batch.observed_rows[i] * stride, (layer * count + i) * size
        for k in range(size):
            observed[to + k] = qkv[start + k]


@kernel
def layer_kv(config: DecoderConfig, cache: KVCache, layer: int) -> LayerKV:
    slots = entry_count(cache.keys, config.head_dim) // (config.layers * config.kv_heads)
    return LayerKV(cache, slots, layer * config.kv_heads * slots)


@kernel
def project_block(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, cache: KVCache,
    layer: int, batch: Batch, hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """Compute queries, keys and values from norm(hidden); store keys and values."""
    rows, width = len(batch.token_ids), weights.qkv.outputs
    kv = layer_kv(config, cache, layer)
    start = norm_rows(context, hidden, rows, weights.attn_norm, layer, workspace.normed)
    _multiply(
        context, config, workspace.normed, start, weights.qkv, layer,
        LinearOutput(workspace.qkv, rows, width, False, 1.0, workspace.maxima[0], False),
        tiling_of(workspace, context, QKV_TILES),
    )  # fmt: skip
    end_phase(context, QKV)
    _rotate_and_store(context, config, weights, kv, layer, batch, workspace.qkv)
    end_phase(context, ROTATE)


@kernel
def attend_layer(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, cache: KVCache,
    layer: int, batch: Batch, workspace: Workspace, attend_parts: int,
) -> None:  # fmt: skip
    """Compute attention(queries), of what ``project_block`` left."""
    kv = layer_kv(config, cache, layer)
    heads = layer_heads(config, weights, layer)
    scratch, cells = workspace.attention[context.thread], workspace.cells[context.thread]
    queries = Queries(workspace.qkv, weights.qkv.outputs)
    attend(
        context, queries, kv, heads, batch.attention, workspace.attended, scratch, cells,
        workspace.partials,
    )  # fmt: skip
    end_phase(context, ATTENTION)
    if batch.attention.partials > 0:
        merge_partials(
            context, cache.values, heads, batch.attention, workspace.attended, scratch, cells,
            workspace.partials,
        )  # fmt: skip
        end_phase(context, ATTENTION)
    if attend_parts != 0:
        call_kernel(
            attend_parts,
            (
                context.thread, context.threads, context.sync, kv, heads, queries, batch.parts,
                workspace.attended,
            ),
        )  # fmt: skip
        end_phase(context, ATTENTION)


@kernel
def output_block(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, layer: int, rows: int,
    hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """hidden += o(attended)."""
    _multiply(
        context, config, workspace.attended, 0, weights.o, layer,
        added_rows(config, hidden, rows, workspace), tiling_of(workspace, context, OUTPUT_TILES),
    )  # fmt: skip
    end_phase(context, OUTPUT)
    if config.post_norms:
        _add_normed(context, config, weights.attn_post_norm, layer, hidden, rows, workspace)


@kernel
def mlp_block(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, layer: int, rows: int,
    hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """hidden += down(act(gate(norm(hidden))) * up(norm(hidden)))."""
    start = norm_rows(context, hidden, rows, weights.mlp_norm, layer, workspace.normed)
    call_kernel(
        config.gated_linear,
        (
            context, workspace.normed, start, rows, weights.gate_up, layer, workspace.gated,
            tiling_of(workspace, context, GATE_UP_TILES),
        ),
    )  # fmt: skip
    end_phase(context, GATE_UP)
    _multiply(
        context, config, workspace.gated, 0, weights.down, layer,
        added_rows(config, hidden, rows, workspace), tiling_of(workspace, context, DOWN_TILES),
    )  # fmt: skip
    end_phase(context, DOWN)
    if config.post_norms:
        _add_normed(context, config, weights.mlp_post_norm, layer, hidden, rows, workspace)


@kernel
def has_experts(config: DecoderConfig, layer: int, workspace: Workspace) -> bool:
    """Return whether a layer's MLP is a mixture of experts."""
    if config.mix_experts == 0:
        return False
    return workspace.experts[len(workspace.experts) - config.layers + layer] >= 0


@kernel
def mixture_block(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, layer: int, rows: int,
    hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """hidden += a mixture of experts of norm(hidden); all threads share all rows."""
    start = norm_rows(context, hidden, rows, weights.mlp_norm, layer, workspace.normed)
    call_kernel(
        config.mix_experts,
        (
            context, config, layer, rows, workspace.normed, start, hidden, workspace.gated,
            tiling_of(workspace, context, GATE_UP_TILES), tiling_of(workspace, context, DOWN_TILES),
            workspace.experts,
        ),
    )  # fmt: skip


@kernel
def _between_attentions(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, cache: KVCache,
    layer: int, part: Part, batch: Batch, hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """Compute what follows a layer's attention, up to that of the next layer."""
    rows = len(batch.token_ids)
    if part.output:
        output_block(context, config, weights, layer, rows, hidden, workspace)
    if part.mlp:
        mlp_block(context, config, weights, layer, rows, hidden, workspace)
    if part.project:
        project_block(context, config, weights, cache, layer + 1, batch, hidden, workspace)


@kernel
def run_rows(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, cache: KVCache,
    layer: int, part: Part, batch: Batch, hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """Run ``_between_attentions`` over all rows: together, or each thread over blocks of them."""
    rows, qkv = len(batch.token_ids), weights.qkv.outputs
    blocks = count_blocks(rows, context.threads)
    if blocks == 0:
        _between_attentions(context, config, weights, cache, layer, part, batch, hidden, workspace)
    else:
        width, attended, gated = config.hidden, weights.o.inputs, weights.down.inputs
        own = alone(context, workspace.alone)
        block = take_work(context.sync, 1)
        while block < blocks:
            first, end = block * rows // blocks, (block + 1) * rows // blocks
            memory = workspace_part(workspace, context.thread, first, width, qkv, attended, gated)
            _between_attentions(
                own, config, weights, cache, layer, part, batch_part(batch, first, end),
                hidden[first * width :], memory,
            )  # fmt: skip
            block = take_work(context.sync, 1)
        end_phase(context, NORM)
    if part.project:
        keep_queries(context, config, layer + 1, batch, workspace.qkv, qkv, workspace.observed)


@kernel
def compute_logits(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, batch: Batch,
    hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """Compute logits of the wanted rows, [outputs, vocab padded to whole panels], and find the
    largest of each.
    """
    outputs, width, normed = len(batch.logit_rows), config.hidden, workspace.normed
    for i in range(context.thread, outputs, context.threads):
        at = i * width
        norm(hidden, batch.logit_rows[i] * width, weights.final_norm, 0, normed.values, at)
        if config.logits_multiplier != 1.0:
            for k in range(at, at + width):
                normed.values[k] *= np.float32(config.logits_multiplier)
        quantize(normed, at, width)
    end_phase(context, NORM)
    stride, maxima = len(weights.head.bias), workspace.maxima[context.thread]
    start_argmax(maxima, outputs)
    _multiply(
        context, config, normed, 0, weights.head, 0,
        LinearOutput(workspace.logits, outputs, stride, False, 1.0, maxima, True),
        tiling_of(workspace, context, HEAD_TILES),
    )  # fmt: skip
    end_phase(context, HEAD)
    for row in range(context.thread, outputs, context.threads):
        finish_argmax(workspace.maxima, context.threads, row, workspace.argmax)


@kernel
def touch_pages(
    context: ThreadContext, config: DecoderConfig, cache: KVCache, slots: Int32Array,
    first_layer: int, end_layer: int,
) -> None:  # fmt: skip
    """Write to the pages of memory that begin with one of some slots, in some layers, all heads.

    Slots may be those of one layer alone, so no layer is touched that isn't written with them.

    The system gives a page when it is first written to, in 2 to 3 µs. Threads that share the rows
    of a step would ask for the same page at the same time, in every layer and head, and wait for
    each other. Here each takes other pages.
    """
    dim, regions = config.head_dim, config.layers * config.kv_heads
    held = entry_count(cache.keys, dim) // regions
    begin, end = first_layer * config.kv_heads, end_layer * config.kv_heads
    for region in range(begin + context.thread, end, context.threads):
        for slot in slots:
            at = (region * held + slot) * dim
            touch_page(cache.keys, at, dim)
            touch_page(cache.values, at, dim)


@kernel
def _forward(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig, weights: DecoderWeights,
    cache: KVCache, batch: Batch, hidden: Float32Array, workspace: Workspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass, see ``forward``."""
    context = ThreadContext(thread, threads, sync, workspace.clock)
    start_clock(workspace.clock, thread)
    rows, width = len(batch.token_ids), config.hidden
    first, end = stages.first_layer, stages.end_layer
    if stages.embed:
        if threads > 1 and count_blocks(rows, threads) == 0:
            touch_pages(context, config, cache, batch.write_slots, first, end)
        for row in range(thread, rows, threads):
            embed(
                batch.token_ids[row], weights.embed, config.embedding_multiplier, hidden,
                row * width,
            )  # fmt: skip
        end_phase(context, EMBED)
    if not stages.projected and (first < end or stages.project):
        start = Part(False, False, True)
        run_rows(context, config, weights, cache, first - 1, start, batch, hidden, workspace)
    for layer in range(first, end):
        parts = stages.attend_parts
        attend_layer(context, config, weights, cache, layer, batch, workspace, parts)
        follows = layer + 1 < end or stages.project
        mixed = has_experts(config, layer, workspace)
        part = Part(True, not mixed, not mixed and follows)
        run_rows(context, config, weights, cache, layer, part, batch, hidden, workspace)
        if mixed:
            mixture_block(context, config, weights, layer, rows, hidden, workspace)
            if follows:
                part = Part(False, False, True)
                run_rows(context, config, weights, cache, layer, part, batch, hidden, workspace)
    if stages.logits and len(batch.logit_rows) > 0:
        compute_logits(context, config, weights, batch, hidden, workspace)


@in_child
@entry_point
def forward(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig, weights: DecoderWeights,
    cache: KVCache, batch: Batch, hidden: Float32Array, workspace: Workspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass over a batch, on one of ``threads`` threads.

    Args:
        thread, threads, sync: see ThreadPool.run_on_standby.
        config: the model.
        weights: of the model; of one with attention sinks, ``sinks.SinkWeights``.
        cache: K and V of all slots; those of the batch's rows are written, layer by layer.
        batch: the step.
        hidden: float32 [rows * hidden], updated in place.
        workspace: large enough for the batch; takes the logits.
        stages: what to run.
    """
    arguments = (config, weights, cache, batch, hidden, workspace, stages)
    signature = signature_of(arguments)
    if thread == 0:
        publish(sync, arguments)
        if start_workers(sync, threads, signature):
            _forward(thread, threads, sync, *arguments)
        return
    running = True
    while running:
        run = current_run(sync)
        _forward(thread, running_threads(sync), sync, *arguments)
        running = await_run(sync, thread, run, signature)
        if running:
            arguments = published(sync, arguments)
