"""A mixture's experts, all at once, in Triton: each tile of rows is multiplied by one expert.

With few rows, every (row, expert) pair is a tile of its own. With many, pairs are sorted by expert,
so that an expert's weights are read once per tile. How many tiles there are at most depends on the
shapes alone, so a CUDA graph can hold it.
"""

import torch
import triton
import triton.language as tl

from midfill.models.config import Activation
from midfill.runners.torch.weights import MlpWeights

_TILE = 64
_LEAST_TILE = 16  # rows of the smallest matrix product
_GATES: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "swiglu_oai")


def expand_experts(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: MlpWeights,
    activation: Activation,
    limit: float,
) -> torch.Tensor:
    """Return what each row's experts make of it, weighted and summed: [rows, hidden].

    Args:
        hidden: [rows, hidden], contiguous.
        chosen: [rows, per_token] int64, each row's experts.
        weights: [rows, per_token] float32.
        experts: all of a layer: up [experts, 2 * ffn, hidden] with rows of gate first, down
            [experts, hidden, ffn]; their biases [experts, 2 * ffn] and [experts, hidden].
        activation: of the gate.
        limit: see ``ModelConfig.swiglu_limit``.
    """
    rows, size = hidden.shape
    per_token, count = chosen.shape[1], len(experts.up.weight)
    ffn = experts.down.weight.shape[2]
    pairs = rows * per_token
    few = pairs <= 2 * count
    tiles = _tiles_of_one(chosen) if few else _sorted_tiles(chosen, count)
    inner = hidden.new_empty((pairs, ffn))
    expanded = torch.empty((pairs, size), dtype=torch.float32, device=hidden.device)
    columns, depth = (32, 128) if few else (64, 64)
    if hidden.dtype == torch.float32:
        depth //= 2  # as many bytes
    shape = {"TILE": _LEAST_TILE if few else _TILE, "COLUMNS": columns, "DEPTH": depth}
    up, down = experts.up, experts.down
    _up[(len(tiles[1]), triton.cdiv(ffn, columns))](
        hidden, up.weight, up.weight if up.bias is None else up.bias, inner, *tiles, limit,
        SIZE=size, FFN=ffn, PER_TOKEN=per_token, BIAS=up.bias is not None,
        GATE=_GATES.index(activation), num_warps=4, num_stages=3, **shape,
    )  # fmt: skip
    _down[(len(tiles[1]), triton.cdiv(size, columns))](
        inner, down.weight, down.weight if down.bias is None else down.bias, weights, expanded,
        *tiles,
        SIZE=size, FFN=ffn, BIAS=down.bias is not None, num_warps=4, num_stages=3, **shape,
    )  # fmt: skip
    return expanded.view(rows, per_token, size).sum(dim=1).to(hidden.dtype)


Tiles = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Pairs (their number is row * per_token + rank) in order; of each tile its expert, its first place
in that order, and how many pairs it has, 0 for padding."""


def _tiles_of_one(chosen: torch.Tensor) -> Tiles:
    order = torch.arange(chosen.numel(), device=chosen.device)
    return order, chosen.flatten(), order, torch.ones_like(order)


def _sorted_tiles(chosen: torch.Tensor, experts: int) -> Tiles:
    """Return tiles of pairs that are sent to the same expert, of at most ``_TILE``."""
    flat = chosen.flatten()
    number = torch.arange(experts, device=chosen.device)
    counts = (flat[:, None] == number).sum(dim=0)
    ends, tiles = counts.cumsum(dim=0), (counts + _TILE - 1) // _TILE
    tile_ends = tiles.cumsum(dim=0)
    most = min(len(flat), experts) + len(flat) // _TILE
    tile = torch.arange(most, device=chosen.device)
    expert = torch.searchsorted(tile_ends, tile, right=True).clamp(max=experts - 1)
    within = tile - (tile_ends - tiles)[expert]
    first = (ends - counts)[expert] + within * _TILE
    sizes = (ends[expert] - first).clamp(0, _TILE)
    return flat.argsort(stable=True), expert, first, sizes


@triton.jit
def _up(
    hidden, up, bias, inner, order, tile_experts, tile_firsts, tile_sizes, limit,
    SIZE: tl.constexpr, FFN: tl.constexpr, PER_TOKEN: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute some columns of act(gate) * up of one tile."""
    tile = tl.program_id(0)
    size = tl.load(tile_sizes + tile)
    if size == 0:
        return
    expert = tl.load(tile_experts + tile)
    place = tl.arange(0, TILE)
    real = place < size
    pair = tl.load(order + tl.load(tile_firsts + tile) + place, mask=real, other=0)
    row = pair // PER_TOKEN
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < FFN
    gate_rows = (expert * (2 * FFN) + column) * SIZE
    up_rows = gate_rows + FFN * SIZE
    gates = tl.zeros([TILE, COLUMNS], tl.float32)
    ups = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in range(0, SIZE, DEPTH):
        number = first + tl.arange(0, DEPTH)
        there = number < SIZE
        x = tl.load(
            hidden + row[:, None] * SIZE + number[None, :],
            mask=real[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        mask = inside[None, :] & there[:, None]
        g = tl.load(up + gate_rows[None, :] + number[:, None], mask=mask, other=0.0)
        u = tl.load(up + up_rows[None, :] + number[:, None], mask=mask, other=0.0)
        gates += tl.dot(x, g, input_precision="ieee")
        ups += tl.dot(x, u, input_precision="ieee")
    if BIAS:
        biases = bias + expert * (2 * FFN) + column
        gates += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(biases + FFN, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATE == 0:
        gates = gates * tl.sigmoid(gates)
    elif GATE == 1:
        gates = 0.5 * gates * (1.0 + tl.erf(gates * 0.7071067811865476))
    elif GATE == 2:
        inner_value = 0.7978845608028654 * (gates + 0.044715 * gates * gates * gates)
        gates = gates * tl.sigmoid(2.0 * inner_value)
    else:
        gates = tl.minimum(gates, limit)
        gates = gates * tl.sigmoid(1.702 * gates)
        ups = tl.minimum(tl.maximum(ups, -limit), limit) + 1.0
    tl.store(
        inner + pair[:, None] * FFN + column[None, :], (gates * ups).to(inner.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )  # fmt: skip


@triton.jit
def _down(
    inner, down, bias, weights, expanded, order, tile_experts, tile_firsts, tile_sizes,
    SIZE: tl.constexpr, FFN: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute some columns of what an expert makes of one tile, weighted."""
    tile = tl.program_id(0)
    size = tl.load(tile_sizes + tile)
    if size == 0:
        return
    expert = tl.load(tile_experts + tile)
    place = tl.arange(0, TILE)
    real = place < size
    pair = tl.load(order + tl.load(tile_firsts + tile) + place, mask=real, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    down_rows = (expert * SIZE + column) * FFN
    summed = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in range(0, FFN, DEPTH):
        number = first + tl.arange(0, DEPTH)
        there = number < FFN
        x = tl.load(
            inner + pair[:, None] * FFN + number[None, :],
            mask=real[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            down + down_rows[None, :] + number[:, None],
            mask=inside[None, :] & there[:, None], other=0.0,
        )  # fmt: skip
        summed += tl.dot(x, w, input_precision="ieee")
    if BIAS:
        summed += tl.load(bias + expert * SIZE + column, mask=inside, other=0.0).to(tl.float32)[
            None, :
        ]
    weight = tl.load(weights + pair, mask=real, other=0.0)
    tl.store(
        expanded + pair[:, None] * SIZE + column[None, :], summed * weight[:, None],
        mask=real[:, None] & inside[None, :],
    )  # fmt: skip
