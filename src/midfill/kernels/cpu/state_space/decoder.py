"""The forward pass of a decoder some of whose layers have a state: one compiled call per step.

Attention, MLPs and the head are those of ``kernels.cpu.decoder``, over the same memory. All threads
share each phase; there are no blocks of rows that a thread runs by itself. The type of the weights
says which kind of state a model has, so the pass for one is the code of that one alone.
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
    has_experts,
    mlp_block,
    norm_rows,
    output_block,
    project_block,
    tiling_of,
    touch_pages,
)
from midfill.kernels.cpu.decoder_data import (
    Batch,
    DecoderConfig,
    DecoderWeights,
    Stages,
    Workspace,
)
from midfill.kernels.cpu.embedding import embed
from midfill.kernels.cpu.jit import entry_point, in_child, inlined_kernel, kernel, kernel_by_type
from midfill.kernels.cpu.kv_cache import KVCache
from midfill.kernels.cpu.linear import LinearOutput
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array
from midfill.kernels.cpu.standby import (
    await_run,
    current_run,
    publish,
    published,
    running_threads,
    signature_of,
    start_workers,
)
from midfill.kernels.cpu.state_space.data import (
    DeltaWeights,
    StateDecoderWeights,
    StateWeights,
    StateWorkspace,
)
from midfill.kernels.cpu.state_space.delta_rule import (
    apply_delta_rule,
    compute_gates,
    convolve_heads,
    gate_attended,
    gate_heads,
)
from midfill.kernels.cpu.state_space.recurrence import (
    advance_states,
    compute_steps,
    convolve,
    gate_rows,
)
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.tiles import DOWN_TILES, GATE_UP_TILES, OUTPUT_TILES, QKV_TILES


@inlined_kernel
def _advance_state_space(
    own: StateWeights, context: ThreadContext, layer: int, rows: int, indptr: Int32Array,
    space: StateWorkspace,
) -> None:  # fmt: skip
    memory = space.memory
    convolve(context, own, layer, indptr, space)
    compute_steps(context, own, layer, rows, memory)
    end_phase(context, ROTATE)
    advance_states(context, own, layer, indptr, space)
    end_phase(context, ATTENTION)
    gate_rows(context, own, layer, rows, memory)


@inlined_kernel
def _advance_delta_rule(
    own: DeltaWeights, context: ThreadContext, layer: int, rows: int, indptr: Int32Array,
    space: StateWorkspace,
) -> None:  # fmt: skip
    memory = space.memory
    convolve_heads(context, own, layer, indptr, space)
    compute_gates(context, own, layer, rows, memory)
    end_phase(context, ROTATE)
    apply_delta_rule(context, own, layer, indptr, space)
    end_phase(context, ATTENTION)
    gate_heads(context, own, layer, rows, memory)


@kernel_by_type
def _advance(own: Any, *_: Any) -> Any:
    """Advance the states of a layer, and compute what it puts out, before its last product.

    Arguments: (weights, this thread, layer's number among those with a state, rows, first rows of
    the requests, memory).
    """
    return _advance_delta_rule if "query_gate" in own.fields else _advance_state_space


@inlined_kernel
def _leave_as_it_is(
    own: StateWeights, context: ThreadContext, config: DecoderConfig, layer: int, rows: int,
    space: StateWorkspace,
) -> None:  # fmt: skip
    """Attention has no gates."""


@inlined_kernel
def _gate(
    own: DeltaWeights, context: ThreadContext, config: DecoderConfig, layer: int, rows: int,
    space: StateWorkspace,
) -> None:  # fmt: skip
    gate_attended(context, config, own, layer, rows, space)


@kernel_by_type
def _finish_attention(own: Any, *_: Any) -> Any:
    """Gate what attention put out, in models that do.

    Arguments: (weights, this thread, configuration, layer's number among those with attention,
    rows, memory).
    """
    return _gate if "query_gate" in own.fields else _leave_as_it_is


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
    _advance(own, context, layer, rows, indptr, space)
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
def _mix_experts(
    context: ThreadContext, config: DecoderConfig, weights: DecoderWeights, layer: int,
    listed: int, rows: int, hidden: Float32Array, workspace: Workspace,
) -> None:  # fmt: skip
    """hidden += a mixture of experts of norm(hidden); ``decoder.mixture_block`` of a layer that is
    ``listed`` under another number, since ``config`` counts layers with attention only.
    """
    start = norm_rows(context, hidden, rows, weights.mlp_norm, layer, workspace.normed)
    call_kernel(
        config.mix_experts,
        (
            context, config, listed, rows, workspace.normed, start, hidden, workspace.gated,
            tiling_of(workspace, context, GATE_UP_TILES), tiling_of(workspace, context, DOWN_TILES),
            workspace.experts,
        ),
    )  # fmt: skip


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
            _finish_attention(weights.states, context, config, number, rows, space)
            output_block(context, config, decoder, number, rows, hidden, workspace)
        else:
            _mix_states(context, config, weights, -1 - number, batch, hidden, space)
        listed = layer + config.layers - len(weights.states.numbers)
        if has_experts(config, listed, workspace):
            _mix_experts(context, config, decoder, layer, listed, rows, hidden, workspace)
        else:
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
        _forward_states(thread, running_threads(sync), sync, *arguments)
        running = await_run(sync, thread, run, signature)
        if running:
            arguments = published(sync, arguments)
