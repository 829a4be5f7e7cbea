"""The mixture of experts of one layer, over all rows of a step.

Rows are sorted by expert, and each expert's weights are read once for all of its rows. Threads
share the panels of the experts that have rows, in the order in which they lie in memory. Each
expert's output of a row is computed by itself, and a row's are added up from its likeliest expert
to its least likely one: so a row's result has the same bits whatever rows are beside it.

Products are those of linear.py, called through their address: a run of panels is a matrix.
"""

from typing import Any

import numpy as np

from midfill.kernels.cpu.activations import (
    ACTIVATION_BLOCK_BYTES,
    Activations,
    block_at,
    quantize_groups,
)
from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.clock import DOWN, GATE_UP, NORM, end_phase
from midfill.kernels.cpu.decoder_data import DecoderConfig
from midfill.kernels.cpu.experts.prefetch import ask_for_experts
from midfill.kernels.cpu.experts.routing import choose_experts, sort_pairs
from midfill.kernels.cpu.experts.table import (
    CHUNK_ROWS,
    MAX_MIXED_ROWS,
    SCRATCH_PANELS,
    SWIGLU_OAI,
    ExpertMemory,
    ExpertSizes,
    Mixture,
    unpack,
)
from midfill.kernels.cpu.jit import entry_point, in_child, kernel
from midfill.kernels.cpu.linear import LinearOutput, LinearWeights, Tiling, activate
from midfill.kernels.cpu.memory import Float32Array, Int64Array
from midfill.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    fma,
    load,
    maximum,
    multiply,
    splat,
    store,
    subtract,
)
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.weight_formats import GROUP, PANEL
from midfill.kernels.cpu.work_stealing import next_run

SWIGLU_OAI_ALPHA = 1.702
_SUM_COLUMNS = 256
"""Columns of a row that a thread adds up at a time."""


@kernel
def _alone(context: ThreadContext) -> ThreadContext:
    """Return a thread's context as the only thread, for products that it computes by itself."""
    return ThreadContext(context.thread * 0, context.thread * 0 + 1, context.sync, context.clock)


@kernel
def _panels_from(weights: LinearWeights, panel: int, outputs: int, biased: int) -> LinearWeights:
    """Return the panels from one on as a matrix with so many outputs."""
    bias = weights.bias
    if biased != 0:
        bias = bias[panel * PANEL :]
    return LinearWeights(weights.packed, weights.panels[panel:], bias, outputs, weights.inputs)


@kernel
def _open(sizes: ExpertSizes, limit: Any, gate: Any, up: Any) -> Any:
    """Return act(gate) * up."""
    if sizes.activation != SWIGLU_OAI:
        return multiply(activate(gate, sizes.activation), up)
    # (up + 1) * gate * sigmoid(1.702 * gate), where gate is at most the limit and up within it. A
    # NaN that is the second operand of ``maximum`` stays one.
    zero, one, least = splat(np.float32(0.0)), splat(np.float32(1.0)), splat(-limit)
    gate = subtract(zero, maximum(least, subtract(zero, gate)))
    up = maximum(least, subtract(zero, maximum(least, subtract(zero, up))))
    powers = exp(multiply(splat(np.float32(-SWIGLU_OAI_ALPHA)), gate))
    return multiply(add(up, one), divide(gate, add(one, powers)))


@kernel
def _gather(
    context: ThreadContext, hidden: int, pairs: int, x: Activations, x_at: int,
    memory: ExpertMemory,
) -> None:  # fmt: skip
    """Copy the pairs' rows, in order."""
    out = memory.gathered
    size = hidden // GROUP * ACTIVATION_BLOCK_BYTES
    for place in range(context.thread, pairs, context.threads):
        source = x_at + memory.ordered_rows[place] * hidden
        if len(out.values) > 0:
            for i in range(0, hidden, LANES):
                store(out.values, place * hidden + i, load(x.values, source + i))
        if len(out.quants) > 0:
            at = block_at(source)
            for k in range(size):
                out.quants[place * size + k] = x.quants[at + k]


@kernel
def _open_rows(
    sizes: ExpertSizes, limit: Any, memory: ExpertMemory, scratch_at: int, rows: int, panels: int,
    place: int, panel: int,
) -> None:  # fmt: skip
    """Compute act(gate) * up of products in the scratch, [rows, panels, gate and up, 32]."""
    scratch, opened = memory.scratch, memory.opened
    for row in range(rows):
        start = scratch_at + row * panels * 2 * PANEL
        target = (place + row) * sizes.ffn + panel * PANEL
        for number in range(panels):
            at = start + number * 2 * PANEL
            for lane in range(0, PANEL, LANES):
                gate, up = load(scratch, at + lane), load(scratch, at + PANEL + lane)
                value = _open(sizes, limit, gate, up)
                store(scratch, at + lane, value)
                if len(opened.values) > 0:
                    store(opened.values, target + number * PANEL + lane, value)
        if len(opened.quants) > 0:
            quantize_groups(
                scratch, start, 2 * PANEL, panels, opened.quants, block_at(target),
                ACTIVATION_BLOCK_BYTES,
            )  # fmt: skip


@kernel
def _open_expert(
    context: ThreadContext, linear: int, mixture: Mixture, layer: int, expert: int, panel: int,
    panels: int, tiling: Tiling,
) -> None:  # fmt: skip
    """Compute some panels of act(gate) * up, of all rows of an expert."""
    sizes, memory = mixture.sizes, mixture.memory
    weights, hidden = mixture.weights.gate_up, mixture.weights.gate_up.inputs
    first: Any = np.int64(memory.starts[expert])
    end: Any = np.int64(memory.starts[expert + 1])
    own = context.thread * SCRATCH_PANELS * 2 * PANEL
    scratch = memory.scratch[own:]
    width = SCRATCH_PANELS // min(end - first, CHUNK_ROWS)
    all_panels = sizes.ffn // PANEL
    stop = panel + panels
    while panel < stop:
        held = min(width, stop - panel)
        outputs = held * 2 * PANEL
        number = (layer * sizes.experts + expert) * all_panels + panel
        matrix = _panels_from(weights, number * 2, outputs, sizes.biased)
        for place in range(first, end, CHUNK_ROWS):
            rows = min(end - place, CHUNK_ROWS)
            call_kernel(
                linear,
                (
                    _alone(context), memory.gathered, place * hidden, matrix, context.thread * 0,
                    LinearOutput(scratch, rows, outputs, False, 1.0, scratch, False), tiling,
                ),
            )  # fmt: skip
            limit = mixture.weights.swiglu_limit[0]
            _open_rows(sizes, limit, memory, own, rows, held, place, panel)
        panel += held


@kernel
def _close_expert(
    context: ThreadContext, linear: int, mixture: Mixture, layer: int, expert: int, panel: int,
    panels: int, tiling: Tiling,
) -> None:  # fmt: skip
    """Compute some panels of an expert's outputs, of all of its rows."""
    sizes, memory, weights = mixture.sizes, mixture.memory, mixture.weights.down
    hidden = mixture.weights.gate_up.inputs
    first: Any = np.int64(memory.starts[expert])
    end: Any = np.int64(memory.starts[expert + 1])
    number = (layer * sizes.experts + expert) * (hidden // PANEL) + panel
    values = memory.expanded[first * hidden + panel * PANEL :]
    call_kernel(
        linear,
        (
            _alone(context), memory.opened, first * sizes.ffn,
            _panels_from(weights, number, panels * PANEL, sizes.biased), context.thread * 0,
            LinearOutput(values, end - first, hidden, False, 1.0, memory.scratch, False),
            tiling,
        ),
    )  # fmt: skip


@kernel
def _run_experts(
    context: ThreadContext, linear: int, mixture: Mixture, layer: int, opens: bool, tiling: Tiling
) -> None:
    """Compute the first or the second half of all experts that have rows."""
    sizes, memory = mixture.sizes, mixture.memory
    panels = (sizes.ffn if opens else mixture.weights.gate_up.inputs) // PANEL
    items = memory.active[sizes.experts] * panels
    turn = 0
    while True:
        first, end = next_run(context, turn, items)
        if first >= items:
            break
        turn += 1
        while first < end:
            number, panel = first // panels, first % panels
            run = min(end - first, panels - panel)
            expert: Any = np.int64(memory.active[number])
            if opens:
                _open_expert(context, linear, mixture, layer, expert, panel, run, tiling)
            else:
                _close_expert(context, linear, mixture, layer, expert, panel, run, tiling)
            first += run


@kernel
def _add_up(
    context: ThreadContext, mixture: Mixture, rows: int, hidden: Float32Array, hidden_at: int,
    multiplier: float,
) -> None:  # fmt: skip
    """hidden += multiplier * (weighted sum of the outputs of each row's experts)."""
    sizes, memory, width = mixture.sizes, mixture.memory, mixture.weights.gate_up.inputs
    per_token = sizes.per_token
    blocks = (width + _SUM_COLUMNS - 1) // _SUM_COLUMNS
    for unit in range(context.thread, rows * blocks, context.threads):
        row, start = unit // blocks, unit % blocks * _SUM_COLUMNS
        pair, weight = row * per_token, row * (per_token + 1)
        for column in range(start, min(start + _SUM_COLUMNS, width), LANES):
            total = splat(np.float32(0.0))
            for rank in range(per_token):
                at = np.int64(memory.places[pair + rank]) * width + column
                factor = splat(memory.weights[weight + rank])
                total = fma(factor, load(memory.expanded, at), total)
            if sizes.shared_ffn > 0:
                factor = splat(memory.weights[weight + per_token])
                total = fma(factor, load(memory.shared, row * width + column), total)
            target = hidden_at + row * width + column
            value = load(hidden, target)
            store(hidden, target, add(value, multiply(splat(np.float32(multiplier)), total)))


@kernel
def _share(
    context: ThreadContext, config: DecoderConfig, mixture: Mixture, layer: int, rows: int,
    x: Activations, x_at: int, gated: Activations, tilings: tuple[Tiling, Tiling],
) -> None:  # fmt: skip
    """Compute the shared expert's outputs of all rows."""
    weights, memory = mixture.weights, mixture.memory
    call_kernel(
        config.gated_linear, (context, x, x_at, rows, weights.shared, layer, gated, tilings[0])
    )
    end_phase(context, GATE_UP)
    out = LinearOutput(memory.shared, rows, config.hidden, False, 1.0, memory.scratch, False)
    call_kernel(
        config.linear,
        (context, gated, context.thread * 0, weights.shared_down, layer, out, tilings[1]),
    )
    end_phase(context, DOWN)


@kernel
def _mix(
    context: ThreadContext, config: DecoderConfig, mixture: Mixture, layer: int, rows: int,
    x: Activations, x_at: int, hidden: Float32Array, hidden_at: int, gated: Activations,
    tilings: tuple[Tiling, Tiling],
) -> None:  # fmt: skip
    """Run ``mix_experts`` over up to ``MAX_MIXED_ROWS`` rows."""
    sizes, memory, router = mixture.sizes, mixture.memory, mixture.weights.router
    call_kernel(
        config.linear,
        (
            context, x, x_at, router, layer,
            LinearOutput(memory.scores, rows, router.outputs, False, 1.0, memory.scratch, False),
            Tiling(memory.router_tiles, tilings[0].products),
        ),
    )  # fmt: skip
    end_phase(context, NORM)
    for row in range(context.thread, rows, context.threads):
        choose_experts(sizes, mixture.weights, memory, layer, row, router.outputs)
    end_phase(context, NORM)
    if context.thread == 0:
        sort_pairs(sizes, memory, rows)
    end_phase(context, NORM)
    ask_for_experts(context, mixture, layer)
    _gather(context, config.hidden, rows * sizes.per_token, x, x_at, memory)
    end_phase(context, NORM)
    if sizes.shared_ffn > 0:
        _share(context, config, mixture, layer, rows, x, x_at, gated, tilings)
    for opens in (True, False):
        tiling = tilings[0] if opens else tilings[1]
        linear = sizes.linear if sizes.linear != 0 else config.linear
        _run_experts(context, linear, mixture, layer, opens, tiling)
        end_phase(context, GATE_UP if opens else DOWN)
    _add_up(context, mixture, rows, hidden, hidden_at, config.residual_multiplier)
    end_phase(context, NORM)


@in_child
@entry_point
def mix_experts(
    context: ThreadContext, config: DecoderConfig, layer: int, rows: int, x: Activations,
    x_at: int, hidden: Float32Array, gated: Activations, gate_up_tiling: Tiling,
    down_tiling: Tiling, table: Int64Array,
) -> None:  # fmt: skip
    """Compute hidden += the mixture of experts of x, together with all threads.

    Args:
        context: this thread.
        config: the model, with the addresses of ``linear`` and ``gated_linear``.
        layer: of the model.
        rows: to compute.
        x: normed rows [rows, hidden].
        x_at: element of ``x`` at which this thread finds the first one.
        hidden: float32 [rows * hidden].
        gated: [rows, shared_ffn], for the shared expert.
        gate_up_tiling, down_tiling: how to cut rows, and this thread's memory.
        table: see ``make_table``.
    """
    mixture = unpack(table)
    number = table[len(table) - config.layers + layer]
    tilings = (gate_up_tiling, down_tiling)
    for first in range(0, rows, MAX_MIXED_ROWS):
        at = first * config.hidden
        _mix(
            context, config, mixture, number, min(rows - first, MAX_MIXED_ROWS), x, x_at + at,
            hidden, at, gated, tilings,
        )  # fmt: skip
