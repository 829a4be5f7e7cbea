"""What happens to hidden rows between matrix products, in Triton: sums, norms and gates."""

import torch
import triton
import triton.language as tl

GATES = ("silu", "gelu", "gelu_tanh")
"""Activations that ``gate`` computes."""


def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    multiplier: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to hidden rows, and norm the sums.

    Args:
        hidden: [rows, hidden], contiguous.
        delta: what is added, of the same shape; None adds nothing.
        multiplier: of delta.
        weight, bias: [hidden], the norm's.
        epsilon: the norm's.
        centred: whether it is a LayerNorm and not an RMSNorm.

    Returns:
        The sums, and the sums normed.
    """
    rows, size = hidden.shape
    total = hidden if delta is None else torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    width = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        hidden, hidden if delta is None else delta, total, normed,
        weight, weight if bias is None else bias, multiplier, epsilon,
        SIZE=size, WIDTH=width, ADD=delta is not None, BIAS=bias is not None, CENTRED=centred,
        num_warps=min(max(width // 256, 1), 8),
    )  # fmt: skip
    return total, normed


def gate(both: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(g) * u of rows [rows, 2 * ffn] of g, then u: [rows, ffn].

    Args:
        both: contiguous.
        activation: one of ``GATES``.
    """
    rows, size = len(both), both.shape[1] // 2
    gated = both.new_empty((rows, size))
    _gate[(rows, triton.cdiv(size, 1024))](
        both, gated, SIZE=size, WIDTH=1024, ACTIVATION=GATES.index(activation), num_warps=4
    )
    return gated


@triton.jit
def _add_norm(
    hidden, delta, total, normed, weight, bias, multiplier, epsilon,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, WIDTH)
    inside = number < SIZE
    at = row * SIZE + number
    values = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32) * multiplier
        # What later layers read is what is normed.
        values = values.to(total.dtype.element_ty)
        tl.store(total + at, values, mask=inside)
        values = values.to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, 0) / SIZE, 0.0)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    scaled = values * factor * tl.load(weight + number, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        scaled += tl.load(bias + number, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _gate(both, gated, SIZE: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = number < SIZE
    g = tl.load(both + row * 2 * SIZE + number, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + row * 2 * SIZE + SIZE + number, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        activated = g * tl.sigmoid(g)
    elif ACTIVATION == 1:
        activated = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        activated = g * tl.sigmoid(2.0 * inner)  # tanh(x) is 2 * sigmoid(2x) - 1
    tl.store(gated + row * SIZE + number, (activated * u).to(gated.dtype.element_ty), mask=inside)
