"""The forward pass of a decoder with attention sinks: that of decoder.py, but for attention.

``weights`` are ``SinkWeights``, which the kernels of that file take like their own.
"""

from typing import Any

from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.clock import ATTENTION, EMBED, end_phase, start_clock
from midfill.kernels.cpu.decoder import (
    Part,
    compute_logits,
    has_experts,
    layer_kv,
    mixture_block,
    run_rows,
    touch_pages,
)
from midfill.kernels.cpu.decoder_data import Batch, DecoderConfig, Stages, Workspace
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.jit import entry_point, in_child, kernel
from midfill.kernels.cpu.kv_cache import KVCache
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.row_blocks import count_blocks
from midfill.kernels.cpu.sink_attention.attention import attend_with_sinks, merge_with_sinks
from midfill.kernels.cpu.sinks import SinkHeads
from midfill.kernels.cpu.standby import (
    await_run,
    current_run,
    publish,
    published,
    signature_of,
    start_workers,
)
from midfill.kernels.cpu.thread_pool import ThreadContext


@kernel
def attend_layer(
    context: ThreadContext, config: DecoderConfig, weights: Any, cache: KVCache,
    layer: int, batch: Batch, workspace: Workspace, attend_parts: int,
) -> None:  # fmt: skip
    """Compute attention(queries), of what ``project_block`` left."""
    dim = config.head_dim
    kv = layer_kv(config, cache, layer)
    heads = SinkHeads(
        config.query_heads, config.kv_heads, config.query_heads // config.kv_heads, dim,
        config.score_scale, weights.windows[layer], weights.sinks,
        layer * config.query_heads,
    )  # fmt: skip
    scratch, cells = workspace.attention[context.thread], workspace.cells[context.thread]
    queries = Queries(workspace.qkv, weights.qkv.outputs)
    attend_with_sinks(
        context, queries, kv, heads, batch.attention, workspace.attended, scratch, cells,
        workspace.partials,
    )  # fmt: skip
    end_phase(context, ATTENTION)
    if batch.attention.partials > 0:
        merge_with_sinks(
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
def _forward(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig, weights: Any,
    cache: KVCache, batch: Batch, hidden: Float32Array, workspace: Workspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass, see ``forward_with_sinks``."""
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
def forward_with_sinks(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig, weights: Any,
    cache: KVCache, batch: Batch, hidden: Float32Array, workspace: Workspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass over a batch, on one of ``threads`` threads.

    Args:
        thread, threads, sync: see ThreadPool.run_on_standby.
        config: the model.
        weights: of the model, ``SinkWeights``.
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
