"""What happens to the rows of q, k and v before attention, in one Triton kernel.

Heads are normed where the model does that, queries and keys are rotated, and keys and values
written to their slots.
"""

import torch
import triton
import triton.language as tl

from midfill.runners.torch.kernels.step_inputs import StepInputs


def rotate_and_store(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: StepInputs,
    turns: tuple[torch.Tensor, torch.Tensor],
    query_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> torch.Tensor:
    """Write a layer's keys and values of a step's rows; return its rotated queries.

    Args:
        qkv: [rows, (query_heads + 2 * kv_heads) * head_dim], contiguous.
        keys, values: the layer's KV cache [slots, kv_heads, head_dim], contiguous.
        inputs: the rows' positions and slots; rows without a slot write nothing.
        turns: cosines and sines [positions, head_dim / 2] float32.
        query_heads: how many of the heads are queries'.
        norms: weights [head_dim] of the RMSNorm of a head of q, and of k; None if there is none.
        epsilon: of the norms.

    Returns:
        [rows, query_heads, head_dim].
    """
    kv_heads, head_dim = keys.shape[1:]
    rows = len(qkv)
    queries = qkv.new_empty((rows, query_heads, head_dim))
    cos, sin = turns
    q_norm, k_norm = (qkv, qkv) if norms is None else norms
    _rotate[(rows, query_heads + 2 * kv_heads)](
        qkv, queries, keys, values, inputs.positions, inputs.write_slots, cos, sin, q_norm, k_norm,
        epsilon,
        QUERY_HEADS=query_heads, KV_HEADS=kv_heads, HALF=head_dim // 2,
        WIDTH=triton.next_power_of_2(head_dim // 2), NORM=norms is not None, num_warps=1,
    )  # fmt: skip
    return queries


@triton.jit
def _rotate(
    qkv, queries, keys, values, positions, write_slots, cos, sin, q_norm, k_norm, epsilon,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Treat one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, WIDTH)
    inside = number < HALF
    dtype = qkv.dtype.element_ty
    at = qkv + (row.to(tl.int64) * (QUERY_HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    first = tl.load(at + number, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + number, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(write_slots + row).to(tl.int64)
    if (head >= QUERY_HEADS) & (slot < 0):
        return
    if head >= QUERY_HEADS + KV_HEADS:
        target = values + (slot * KV_HEADS + head - QUERY_HEADS - KV_HEADS) * (2 * HALF)
        tl.store(target + number, first.to(dtype), mask=inside)
        tl.store(target + HALF + number, second.to(dtype), mask=inside)
        return
    if NORM:
        weight = q_norm
        if head >= QUERY_HEADS:
            weight = k_norm
        mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF)
        factor = tl.rsqrt(mean + epsilon)
        w_first = tl.load(weight + number, mask=inside, other=0.0).to(tl.float32)
        w_second = tl.load(weight + HALF + number, mask=inside, other=0.0).to(tl.float32)
        # Rounded as a norm of its own would round them.
        first = (first * factor * w_first).to(dtype).to(tl.float32)
        second = (second * factor * w_second).to(dtype).to(tl.float32)
    turn = tl.load(positions + row).to(tl.int64) * HALF + number
    c = tl.load(cos + turn, mask=inside, other=0.0)
    s = tl.load(sin + turn, mask=inside, other=0.0)
    turned = (first * c - second * s).to(dtype)
    turned_second = (second * c + first * s).to(dtype)
    if head < QUERY_HEADS:
        target = queries + (row.to(tl.int64) * QUERY_HEADS + head) * (2 * HALF)
        tl.store(target + number, turned, mask=inside)
        tl.store(target + HALF + number, turned_second, mask=inside)
    else:
        target = keys + (slot * KV_HEADS + head - QUERY_HEADS) * (2 * HALF)
        tl.store(target + number, turned, mask=inside)
        tl.store(target + HALF + number, turned_second, mask=inside)
