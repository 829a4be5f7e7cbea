"""The forward pass of a decoder that norms all heads of a row's query together, and of its key.

It is that of ``kernels.cpu.decoder``, with the same weights and over the same memory, but for what
lies between the projection to queries, keys and values and attention. So projections are a pass
over blocks of rows of their own. ``weights.q_norm`` and ``k_norm`` are of all heads together here,
and ``config.qk_norm``, which asks for norms of each head, is False.
"""

from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.clock import EMBED, NORM, QKV, ROTATE, end_phase, start_clock
from midfill.kernels.cpu.decoder import (
    Part,
    attend_layer,
    compute_logits,
    has_experts,
    keep_queries,
    layer_kv,
    mixture_block,
    norm_rows,
    run_rows,
    tiling_of,
    touch_pages,
)
from midfill.kernels.cpu.decoder_data import Batch, DecoderConfig, DecoderWeights, Stages, Workspace
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.jit import entry_point, in_child, kernel
from midfill.kernels.cpu.kv_cache import KVCache, LayerKV, write_entry
from midfill.kernels.cpu.linear import LinearOutput
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.row_blocks import alone, batch_part, count_blocks, workspace_part
from midfill.kernels.cpu.rows import norm, rotate
from midfill.kernels.cpu.standby import (
    await_run,
    current_run,
    publish,
    published,
    signature_of,
    start_workers,
)
from midfill.kernels.cpu.thread_pool import ThreadContext, take_work
from midfill.kernels.cpu.tiles import QKV_TILES


@kernel
def _norm_rotate_and_store(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, kv: LayerKV,
    layer: int, batch: Batch, qkv: Float32Array,
) -> None:  # fmt: skip
    """Norm and rotate queries and keys in place; write keys and values into their slots."""
    dim, heads, kv_heads = config.head_dim, config.query_heads, config.kv_heads
    cache = kv.cache
    width = (heads + 2 * kv_heads) * dim
    for row in range(context.thread, len(batch.token_ids), context.threads):
        position, slot = batch.positions[row], batch.write_slots[row]
        queries = row * width
        keys = queries + heads * dim
        values = keys + kv_heads * dim
        norm(qkv, queries, weights.q_norm, layer, qkv, queries)
        norm(qkv, keys, weights.k_norm, layer, qkv, keys)
        for at in range(queries, values, dim):
            rotate(qkv, at, weights.rope, layer, position)
        for head in range(kv_heads):
            at, entry = head * dim, kv.first_entry + head * kv.slots + slot
            write_entry(qkv, keys + at, dim, cache.keys, cache.key_scales, entry)
            write_entry(qkv, values + at, dim, cache.values, cache.value_scales, entry)


@kernel
def _project(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, cache: KVCache,
    layer: int, batch: Batch, hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """Compute queries, keys and values; store keys and values."""
    rows, width = len(batch.token_ids), weights.qkv.outputs
    kv = layer_kv(config, cache, layer)
    start = norm_rows(context, hidden, rows, weights.attn_norm, layer, workspace.normed)
    out = LinearOutput(workspace.qkv, rows, width, False, 1.0, workspace.maxima[0], False)
    tiling = tiling_of(workspace, context, QKV_TILES)
    call_kernel(config.linear, (context, workspace.normed, start, weights.qkv, layer, out, tiling))
    end_phase(context, QKV)
    _norm_rotate_and_store(context, config, weights, kv, layer, batch, workspace.qkv)
    end_phase(context, ROTATE)


@kernel
def _project_rows(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, cache: KVCache,
    layer: int, batch: Batch, hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """Run ``_project`` over all rows: together, or each thread over blocks of them."""
    rows, qkv = len(batch.token_ids), weights.qkv.outputs
    blocks = count_blocks(rows, context.threads)
    if blocks == 0:
        _project(context, config, weights, cache, layer, batch, hidden, workspace)
    else:
        width, attended, gated = config.hidden, weights.o.inputs, weights.down.inputs
        own = alone(context, workspace.alone)
        block = take_work(context.sync, 1)
        while block < blocks:
            first, end = block * rows // blocks, (block + 1) * rows // blocks
            memory = workspace_part(workspace, context.thread, first, width, qkv, attended, gated)
            part = batch_part(batch, first, end)
            _project(own, config, weights, cache, layer, part, hidden[first * width :], memory)
            block = take_work(context.sync, 1)
        end_phase(context, NORM)
    keep_queries(context, config, layer, batch, workspace.qkv, qkv, workspace.observed)


@kernel
def _forward(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig, weights: DecoderWeights,
    cache: KVCache, batch: Batch, hidden: Float32Array, workspace: Workspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass, see ``forward_with_joint_norms``."""
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
        _project_rows(context, config, weights, cache, first, batch, hidden, workspace)
    for layer in range(first, end):
        attend_layer(context, config, weights, cache, layer, batch, workspace, stages.attend_parts)
        mixed = has_experts(config, layer, workspace)
        part = Part(True, not mixed, False)
        run_rows(context, config, weights, cache, layer, part, batch, hidden, workspace)
        if mixed:
            mixture_block(context, config, weights, layer, rows, hidden, workspace)
        if layer + 1 < end or stages.project:
            _project_rows(context, config, weights, cache, layer + 1, batch, hidden, workspace)
    if stages.logits and len(batch.logit_rows) > 0:
        compute_logits(context, config, weights, batch, hidden, workspace)


@in_child
@entry_point
def forward_with_joint_norms(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig, weights: DecoderWeights,
    cache: KVCache, batch: Batch, hidden: Float32Array, workspace: Workspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass over a batch, on one of ``threads`` threads.

    Args:
        thread, threads, sync: see ThreadPool.run_on_standby.
        config: the model.
        weights: of the model; its norms of queries and keys are those of all heads together.
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
        _forward(thread, threads, sync, *arguments)
        running = await_run(sync, thread, run, signature)
        if running:
            arguments = published(sync, arguments)
