"""The forward pass of a decoder with latent attention: one compiled call per step.

Attention itself, MLPs, mixtures of experts and the head are those of ``kernels.cpu.decoder``, over
the same memory. Here is what lies between. All threads share each phase; there are no blocks of
rows that a thread runs by itself.

A chunk of a prompt is computed in the absorbed form like a decode. That is correct, and takes more
operations per pair of a query and a key: in DeepSeek-V2 1152 multiplications instead of 320.
"""

from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.clock import EMBED, OUTPUT, QKV, end_phase, start_clock
from midfill.kernels.cpu.decoder import (
    added_rows,
    attend_layer,
    compute_logits,
    has_experts,
    keep_queries,
    layer_kv,
    mixture_block,
    mlp_block,
    norm_rows,
    tiling_of,
    touch_pages,
)
from midfill.kernels.cpu.decoder_data import Batch, DecoderConfig, Stages
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.jit import entry_point, in_child, kernel
from midfill.kernels.cpu.kv_cache import KVCache
from midfill.kernels.cpu.latent.data import LatentDecoderWeights, LatentWorkspace
from midfill.kernels.cpu.latent.projections import (
    absorb_queries,
    compute_queries,
    expand_values,
    rotate_and_store,
)
from midfill.kernels.cpu.linear import LinearOutput
from midfill.kernels.cpu.memory import Float32Array, Int64Array
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
from midfill.kernels.cpu.tiles import OUTPUT_TILES, QKV_TILES


@kernel
def _project(
    context: ThreadContext, config: DecoderConfig, weights: LatentDecoderWeights, cache: KVCache,
    layer: int, batch: Batch, hidden: Float32Array, space: LatentWorkspace,
) -> None:  # fmt: skip
    """Compute absorbed queries from norm(hidden); store keys."""
    latent, workspace, memory = weights.latent, space.decoder, space.latent
    rows, maxima = len(batch.token_ids), space.decoder.maxima[0]
    start = norm_rows(context, hidden, rows, weights.decoder.attn_norm, layer, workspace.normed)
    tiling = tiling_of(workspace, context, QKV_TILES)
    width = latent.project.outputs
    out = LinearOutput(memory.projected, rows, width, False, 1.0, maxima, False)
    call_kernel(
        config.linear, (context, workspace.normed, start, latent.project, layer, out, tiling)
    )
    end_phase(context, QKV)
    queries, stride = memory.projected, width
    if latent.sizes.query_rank > 0:
        compute_queries(context, config, weights, layer, rows, memory, tiling, maxima)
        queries, stride = memory.queries, latent.query.outputs
    kv = layer_kv(config, cache, layer)
    rotate_and_store(context, config, weights, kv, layer, batch, queries, stride, space)
    absorb_queries(context, config, weights, layer, rows, queries, stride, space)
    keep_queries(
        context, config, layer, batch, workspace.qkv, weights.decoder.qkv.outputs,
        workspace.observed,
    )  # fmt: skip


@kernel
def _output(
    context: ThreadContext, config: DecoderConfig, weights: LatentDecoderWeights, layer: int,
    rows: int, hidden: Float32Array, space: LatentWorkspace,
) -> None:  # fmt: skip
    """hidden += o(values), of what attention left."""
    expand_values(context, config, weights, layer, rows, space)
    workspace = space.decoder
    call_kernel(
        config.linear,
        (
            context, space.latent.expanded, context.thread * 0, weights.decoder.o, layer,
            added_rows(config, hidden, rows, workspace),
            tiling_of(workspace, context, OUTPUT_TILES),
        ),
    )  # fmt: skip
    end_phase(context, OUTPUT)


@kernel
def _forward_latent(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig,
    weights: LatentDecoderWeights, cache: KVCache, batch: Batch, hidden: Float32Array,
    space: LatentWorkspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass, see ``forward_latent``."""
    workspace, decoder = space.decoder, weights.decoder
    context = ThreadContext(thread, threads, sync, workspace.clock)
    start_clock(workspace.clock, thread)
    rows, width = len(batch.token_ids), config.hidden
    first, end = stages.first_layer, stages.end_layer
    if stages.embed:
        if threads > 1:
            touch_pages(context, config, cache, batch.write_slots, first, end)
        for row in range(thread, rows, threads):
            embed(
                batch.token_ids[row], decoder.embed, config.embedding_multiplier, hidden,
                row * width,
            )  # fmt: skip
        end_phase(context, EMBED)
    if not stages.projected and (first < end or stages.project):
        _project(context, config, weights, cache, first, batch, hidden, space)
    for layer in range(first, end):
        attend_layer(context, config, decoder, cache, layer, batch, workspace, stages.attend_parts)
        _output(context, config, weights, layer, rows, hidden, space)
        if has_experts(config, layer, workspace):
            mixture_block(context, config, decoder, layer, rows, hidden, workspace)
        else:
            mlp_block(context, config, decoder, layer, rows, hidden, workspace)
        if layer + 1 < end or stages.project:
            _project(context, config, weights, cache, layer + 1, batch, hidden, space)
    if stages.logits and len(batch.logit_rows) > 0:
        compute_logits(context, config, decoder, batch, hidden, workspace)


@in_child
@entry_point
def forward_latent(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig,
    weights: LatentDecoderWeights, cache: KVCache, batch: Batch, hidden: Float32Array,
    space: LatentWorkspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass over a batch, on one of ``threads`` threads.

    Args:
        thread, threads, sync: see ThreadPool.run_on_standby.
        config: the model.
        weights: of the model.
        cache: keys of all slots, which are the values, too; those of the batch's rows are written.
        batch: the step.
        hidden: float32 [rows * hidden], updated in place.
        space: large enough for the batch; takes the logits.
        stages: what to run.
    """
    arguments = (config, weights, cache, batch, hidden, space, stages)
    signature = signature_of(arguments)
    if thread == 0:
        publish(sync, arguments)
        if start_workers(sync, threads, signature):
            _forward_latent(thread, threads, sync, *arguments)
        return
    running = True
    while running:
        run = current_run(sync)
        _forward_latent(thread, running_threads(sync), sync, *arguments)
        running = await_run(sync, thread, run, signature)
        if running:
            arguments = published(sync, arguments)
