"""The forward pass of a decoder some of whose layers have a state: one compiled call per step.

Attention, MLPs and the head are those of ``kernels.cpu.decoder``, over the same memory. All threads
share each phase; there are no blocks of rows that a thread runs by itself.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.clock import (
    ATTENTION,
    EMBED,
    NORM,
    OUTPUT,
    QKV,
    ROTATE,
    end_phase,
    start_clock,
)
from midfill.kernels.cpu.decoder import (
    added_rows,
    attend_layer,
    compute_logits,
    mlp_block,
    norm_rows,
    output_block,
    project_block,
    tiling_of,
    touch_pages,
)
from midfill.kernels.cpu.decoder_data import Batch, DecoderConfig, Stages
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.jit import entry_point, in_child, kernel
from midfill.kernels.cpu.kv_cache import KVCache
from midfill.kernels.cpu.linear import LinearOutput
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.standby import (
    await_run,
    current_run,
    publish,
    published,
    signature_of,
    start_workers,
)
from midfill.kernels.cpu.state_space.data import StateDecoderWeights, StateWorkspace
from midfill.kernels.cpu.state_space.recurrence import (
    advance_states,
    compute_steps,
    convolve,
    gate_rows,
)
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.tiles import OUTPUT_TILES, QKV_TILES


@kernel
def _mix_states(
    context: ThreadContext, config: DecoderConfig, weights: StateDecoderWeights, layer: int,
    batch: Batch, hidden: Float32Array, space: StateWorkspace,
) -> None:  # fmt: skip
    """hidden += the outputs of a layer with a state; states advance."""
    own, workspace, memory = weights.states, space.decoder, space.memory
    rows, indptr = len(batch.token_ids), batch.attention.query_indptr
    start = norm_rows(context, hidden, rows, own.before, layer, workspace.normed)
    out = LinearOutput(
        memory.projected, rows, own.sizes.stride, False, 1.0, workspace.maxima[0], False
    )
    call_kernel(
        config.linear,
        (
            context, workspace.normed, start, own.project, layer, out,
            tiling_of(workspace, context, QKV_TILES),
        ),
    )  # fmt: skip
    end_phase(context, QKV)
    convolve(context, own, layer, indptr, space)
    compute_steps(context, own, layer, rows, memory)
    end_phase(context, ROTATE)
    advance_states(context, own, layer, indptr, space)
    end_phase(context, ATTENTION)
    gate_rows(context, own, layer, rows, memory)
    end_phase(context, NORM)
    call_kernel(
        config.linear,
        (
            context, memory.gated, context.thread * 0, own.output, layer,
            added_rows(config, hidden, rows, workspace),
            tiling_of(workspace, context, OUTPUT_TILES),
        ),
    )  # fmt: skip
    end_phase(context, OUTPUT)


@kernel
def _forward_states(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig,
    weights: StateDecoderWeights, cache: KVCache, batch: Batch, hidden: Float32Array,
    space: StateWorkspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass, see ``forward_states``."""
    workspace, decoder = space.decoder, weights.decoder
    context = ThreadContext(thread, threads, sync, workspace.clock)
    start_clock(workspace.clock, thread)
    rows, width = len(batch.token_ids), config.hidden
    if stages.embed:
        if threads > 1 and stages.end_layer > 0:
            touch_pages(context, config, cache, batch.write_slots, 0, config.layers)
        for row in range(thread, rows, threads):
            embed(
                batch.token_ids[row], decoder.embed, config.embedding_multiplier, hidden,
                row * width,
            )  # fmt: skip
        end_phase(context, EMBED)
    for layer in range(stages.first_layer, stages.end_layer):
        number: Any = np.int64(weights.states.numbers[layer])
        if number >= 0:
            project_block(context, config, decoder, cache, number, batch, hidden, workspace)
            attend_layer(
                context, config, decoder, cache, number, batch, workspace, stages.attend_parts
            )
            output_block(context, config, decoder, number, rows, hidden, workspace)
        else:
            _mix_states(context, config, weights, -1 - number, batch, hidden, space)
        mlp_block(context, config, decoder, layer, rows, hidden, workspace)
    if stages.logits and len(batch.logit_rows) > 0:
        compute_logits(context, config, decoder, batch, hidden, workspace)


@in_child
@entry_point
def forward_states(
    thread: int, threads: int, sync: Int64Array, config: DecoderConfig,
    weights: StateDecoderWeights, cache: KVCache, batch: Batch, hidden: Float32Array,
    space: StateWorkspace, stages: Stages,
) -> None:  # fmt: skip
    """Run a part of the forward pass over a batch, on one of ``threads`` threads.

    Args:
        thread, threads, sync: see ThreadPool.run_on_standby.
        config: the model; its layers are those with attention.
        weights: of the model.
        cache: K and V of all slots in layers with attention; those of the batch's rows are written.
        batch: the step. It must not stop between a layer's projections and its attention.
        hidden: float32 [rows * hidden], updated in place.
        space: large enough for the batch; takes the logits, and has the states.
        stages: what to run.
    """
    arguments = (config, weights, cache, batch, hidden, space, stages)
    signature = signature_of(arguments)
    if thread == 0:
        publish(sync, arguments)
        if start_workers(sync, threads, signature):
            _forward_states(thread, threads, sync, *arguments)
        return
    running = True
    while running:
        run = current_run(sync)
        _forward_states(thread, threads, sync, *arguments)
        running = await_run(sync, thread, run, signature)
        if running:
            arguments = published(sync, arguments)
