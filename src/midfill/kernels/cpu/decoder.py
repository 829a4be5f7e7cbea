"""The forward pass of a decoder on the CPU: one compiled call a step.

``forward`` runs on every thread of the team. It goes from any layer to any layer, so that a
method may stop between layers, look at the hidden rows or drop some, and go on; the usual step
is one call for all layers.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.attention import attend, merge_partials
from midfill.kernels.cpu.cells import write_cell
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
from midfill.kernels.cpu.dots import round_row
from midfill.kernels.cpu.jit import entry_point, kernel
from midfill.kernels.cpu.linear import embed, gated_linear, linear, rounded_at
from midfill.kernels.cpu.rows import norm, rotate
from midfill.kernels.cpu.tiles import (
    DOWN_TILES,
    GATE_UP_TILES,
    HEAD_TILES,
    OUTPUT_TILES,
    QKV_TILES,
)

SOLO_ROWS = 4
"""Up to so many rows are normed by every thread for itself, which is cheaper than a barrier."""

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Uint8 = npt.NDArray[np.uint8]


class Shape(NamedTuple):
    """Sizes and switches of the model; the fields of ModelConfig as numbers."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_kind: int
    activation: int
    gated: bool
    qk_norm: bool
    norm_epsilon: float
    score_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_multiplier: float


class Formats(NamedTuple):
    """WeightFormat of each matrix."""

    embed: int
    head: int
    qkv: int
    o: int
    gate: int
    up: int
    down: int


class Weights(NamedTuple):
    """All weights. Matrices: packed bytes, the layers' one after the other; the rest float32.

    Vectors of a layer lie one layer after the other too; absent biases are zeros.
    """

    embed: Uint8
    head: Uint8
    qkv: Uint8
    o: Uint8
    gate: Uint8
    up: Uint8
    down: Uint8
    qkv_bias: Float32
    o_bias: Float32
    gate_bias: Float32
    up_bias: Float32
    down_bias: Float32
    head_bias: Float32
    attn_norm: Float32
    attn_norm_bias: Float32
    mlp_norm: Float32
    mlp_norm_bias: Float32
    final_norm: Float32
    final_norm_bias: Float32
    q_norm: Float32
    k_norm: Float32
    cos: Float32
    sin: Float32
    windows: Int32


class Cells(NamedTuple):
    """KV of all slots, see cells.py: [layers, kv_heads, slots, head_dim] each, and its scales."""

    keys: npt.NDArray[np.generic]
    values: npt.NDArray[np.generic]
    key_scales: Float32
    value_scales: Float32


class Batch(NamedTuple):
    """The arrays of a ForwardBatch and the attention plan made for it."""

    token_ids: Int32
    positions: Int32
    write_slots: Int32
    query_indptr: Int32
    kv_indptr: Int32
    kv_slots: Int32
    logit_rows: Int32
    items: Int32
    tiles: int
    partials: int


class Workspace(NamedTuple):
    """Activations of a step. [rows, width] float32 flat, but for the last nine.

    ``normed`` has one part a thread, each as large as ``hidden``. ``*_codes`` are the same rounded
    to blocks of dots.py; empty where all weights are float32. ``tiles`` and ``attention`` are
    [threads, size]; ``partial_state`` and ``partial_sums`` see attention.py, ``clock`` clock.py,
    ``heights`` tiles.py.
    """

    hidden: Float32
    normed: Float32
    qkv: Float32
    attended: Float32
    gated: Float32
    logits: Float32
    normed_codes: Uint8
    attended_codes: Uint8
    gated_codes: Uint8
    tiles: npt.NDArray[np.float32]
    attention: npt.NDArray[np.float32]
    partial_state: Float32
    partial_sums: Float32
    clock: npt.NDArray[np.int64]
    heights: Uint8


@kernel
def _round_row(x: Any, at: int, size: int, rounded: Any) -> None:
    """Round x[at:at + size] to its place in ``rounded``, if that is not empty."""
    if len(rounded) > 0:
        round_row(x, at, size, rounded, rounded_at(at))


@kernel
def _norm_rows(
    thread: int, threads: int, sync: Any, shape: Any, rows: int, weight: Any, bias: Any,
    weight_at: int, work: Any,
) -> int:  # fmt: skip
    """Norm of all hidden rows; returns where in ``work.normed`` this thread finds them."""
    width = shape.hidden
    x, out, rounded = work.hidden, work.normed, work.normed_codes
    if rows <= SOLO_ROWS:
        start = thread * rows * width
        for row in range(rows):
            norm(
                shape.norm_kind, x, row * width, width, shape.norm_epsilon, weight, bias,
                weight_at, out, start + row * width,
            )  # fmt: skip
            _round_row(out, start + row * width, width, rounded)
        lap(work.clock, thread, NORM)
        return start
    for row in range(thread, rows, threads):
        norm(
            shape.norm_kind, x, row * width, width, shape.norm_epsilon, weight, bias, weight_at,
            out, row * width,
        )  # fmt: skip
        _round_row(out, row * width, width, rounded)
    end_phase(thread, threads, sync, work.clock, NORM)
    return 0


@kernel
def _rotate_and_store(
    thread: int, threads: int, shape: Any, weights: Any, cells: Any, layer: int, layer_at: int,
    slots: int, batch: Any, qkv: Any,
) -> None:  # fmt: skip
    """Rotate queries and keys in place; write keys and values into their slots."""
    dim, heads, kv_heads = shape.head_dim, shape.query_heads, shape.kv_heads
    half = dim // 2
    width = (heads + 2 * kv_heads) * dim
    for row in range(thread, len(batch.token_ids), threads):
        position = batch.positions[row]
        start = row * width
        for head in range(heads):
            at = start + head * dim
            if shape.qk_norm:
                norm(0, qkv, at, dim, shape.norm_epsilon, weights.q_norm, weights.q_norm,
                     layer * dim, qkv, at)  # fmt: skip
            rotate(qkv, at, half, weights.cos, weights.sin, position, qkv, at)
        slot = batch.write_slots[row]
        keys = start + heads * dim
        values = keys + kv_heads * dim
        for head in range(kv_heads):
            at = keys + head * dim
            if shape.qk_norm:
                norm(0, qkv, at, dim, shape.norm_epsilon, weights.k_norm, weights.k_norm,
                     layer * dim, qkv, at)  # fmt: skip
            rotate(qkv, at, half, weights.cos, weights.sin, position, qkv, at)
            head_at = layer_at + head * slots
            write_cell(qkv, at, dim, cells.keys, cells.key_scales, head_at, slot)
            write_cell(
                qkv, values + head * dim, dim, cells.values, cells.value_scales, head_at, slot
            )


@kernel
def _attention_block(
    thread: int, threads: int, sync: Any, shape: Any, formats: Any, weights: Any, cells: Any,
    layer: int, batch: Any, work: Any,
) -> None:  # fmt: skip
    """hidden += o(attention(norm(hidden)))."""
    rows = len(batch.token_ids)
    heads, kv_heads, dim = shape.query_heads, shape.kv_heads, shape.head_dim
    attended = heads * dim
    width = attended + 2 * kv_heads * dim
    tile = work.tiles[thread]
    slots = len(cells.keys) // (shape.layers * kv_heads * dim)
    layer_at = layer * kv_heads * slots
    normed = _norm_rows(
        thread, threads, sync, shape, rows, weights.attn_norm, weights.attn_norm_bias,
        layer * shape.hidden, work,
    )  # fmt: skip
    linear(
        sync, threads, work.normed, work.normed_codes, normed, rows, shape.hidden, weights.qkv,
        layer * (len(weights.qkv) // shape.layers), formats.qkv, width, weights.qkv_bias,
        layer * width, work.qkv, width, False, 1.0, work.heights[QKV_TILES], tile,
    )  # fmt: skip
    end_phase(thread, threads, sync, work.clock, QKV)
    _rotate_and_store(
        thread, threads, shape, weights, cells, layer, layer_at, slots, batch, work.qkv
    )
    end_phase(thread, threads, sync, work.clock, ROTATE)
    attend(
        sync, batch.items, batch.tiles, batch.partials, batch.query_indptr, batch.kv_indptr,
        batch.kv_slots, work.qkv, width, cells, layer_at, slots, heads, kv_heads, dim,
        shape.score_scale, weights.windows[layer], work.attended, work.attended_codes,
        work.attention[thread], work.partial_state, work.partial_sums,
    )  # fmt: skip
    end_phase(thread, threads, sync, work.clock, ATTENTION)
    if batch.partials > 0:
        merge_partials(
            sync, batch.items, batch.tiles, batch.partials, heads, kv_heads, dim, work.attended,
            work.attended_codes, work.attention[thread], work.partial_state, work.partial_sums,
        )  # fmt: skip
        end_phase(thread, threads, sync, work.clock, ATTENTION)
    linear(
        sync, threads, work.attended, work.attended_codes, 0, rows, attended, weights.o,
        layer * (len(weights.o) // shape.layers), formats.o, shape.hidden, weights.o_bias,
        layer * shape.hidden, work.hidden, shape.hidden, True,
        shape.residual_multiplier, work.heights[OUTPUT_TILES], tile,
    )  # fmt: skip
    end_phase(thread, threads, sync, work.clock, OUTPUT)


@kernel
def _mlp_block(
    thread: int, threads: int, sync: Any, shape: Any, formats: Any, weights: Any, layer: int,
    rows: int, work: Any,
) -> None:  # fmt: skip
    """hidden += down(act(gate(norm(hidden))) * up(norm(hidden)))."""
    tile = work.tiles[thread]
    normed = _norm_rows(
        thread, threads, sync, shape, rows, weights.mlp_norm, weights.mlp_norm_bias,
        layer * shape.hidden, work,
    )  # fmt: skip
    gated_linear(
        sync, threads, work.normed, work.normed_codes, normed, rows, shape.hidden, weights.gate,
        weights.up, layer * (len(weights.gate) // shape.layers),
        layer * (len(weights.up) // shape.layers), formats.gate, formats.up, shape.ffn,
        shape.gated, weights.gate_bias, weights.up_bias, layer * shape.ffn, shape.activation,
        work.gated, work.gated_codes, work.heights[GATE_UP_TILES], tile,
    )  # fmt: skip
    end_phase(thread, threads, sync, work.clock, GATE_UP)
    linear(
        sync, threads, work.gated, work.gated_codes, 0, rows, shape.ffn, weights.down,
        layer * (len(weights.down) // shape.layers), formats.down, shape.hidden,
        weights.down_bias, layer * shape.hidden, work.hidden, shape.hidden, True,
        shape.residual_multiplier, work.heights[DOWN_TILES], tile,
    )  # fmt: skip
    end_phase(thread, threads, sync, work.clock, DOWN)


@kernel
def _head(
    thread: int, threads: int, sync: Any, shape: Any, formats: Any, weights: Any, batch: Any,
    work: Any,
) -> None:  # fmt: skip
    """logits of the wanted rows: [outputs, vocab padded to whole panels]."""
    outputs = len(batch.logit_rows)
    width = shape.hidden
    for i in range(thread, outputs, threads):
        norm(
            shape.norm_kind, work.hidden, batch.logit_rows[i] * width, width, shape.norm_epsilon,
            weights.final_norm, weights.final_norm_bias, 0, work.normed, i * width,
        )  # fmt: skip
        if shape.logits_multiplier != 1.0:
            for k in range(width):
                work.normed[i * width + k] *= np.float32(shape.logits_multiplier)
        _round_row(work.normed, i * width, width, work.normed_codes)
    end_phase(thread, threads, sync, work.clock, NORM)
    padded = len(weights.head_bias)
    linear(
        sync, threads, work.normed, work.normed_codes, 0, outputs, width, weights.head, 0,
        formats.head, shape.vocab, weights.head_bias, 0, work.logits, padded, False, 1.0,
        work.heights[HEAD_TILES], work.tiles[thread],
    )  # fmt: skip
    end_phase(thread, threads, sync, work.clock, HEAD)


@entry_point
def forward(
    thread: int, threads: int, sync: Any, shape: Any, formats: Any, weights: Any, cells: Any,
    batch: Any, work: Any, first_layer: int, end_layer: int,
) -> None:  # fmt: skip
    """Layers first_layer <= i < end_layer over the rows in ``work.hidden``.

    Starting at layer 0 looks up the embeddings first; ending at the last layer fills
    ``work.logits`` where rows want logits.
    """
    start_clock(work.clock, thread)
    rows = len(batch.token_ids)
    if first_layer == 0:
        for row in range(thread, rows, threads):
            embed(
                batch.token_ids[row], weights.embed, formats.embed, shape.hidden,
                shape.embedding_multiplier, work.hidden, row * shape.hidden,
            )  # fmt: skip
        end_phase(thread, threads, sync, work.clock, EMBED)
    for layer in range(first_layer, end_layer):
        _attention_block(thread, threads, sync, shape, formats, weights, cells, layer, batch, work)
        _mlp_block(thread, threads, sync, shape, formats, weights, layer, rows, work)
    if end_layer == shape.layers and len(batch.logit_rows) > 0:
        _head(thread, threads, sync, shape, formats, weights, batch, work)
