"""Attention over packed rows: every example by itself, so nothing is computed across examples.

Registered with transformers as ``PACKED_ATTENTION``. The bounds of the examples are passed as
``cu_seq_lens_q``, as in transformers' own packed attention.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

PACKED_ATTENTION = "midfill_packed"


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: list[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each example.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim].
        attention_mask: always None.
        cu_seq_lens_q: where each example starts, and the row's length.
        scaling: factor of the scores; None is head_dim ** -0.5.
        sliding_window: maximum number of keys per query, its own included; None is unlimited.

    Returns:
        [1, tokens, heads, head_dim], and None for the attention weights.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lengths = [stop - start for start, stop in pairwise(cu_seq_lens_q)]
    queries, keys, values = (torch.split(each, lengths, dim=2) for each in (query, key, value))
    parts = [
        _attend(*example, scale, sliding_window)
        for example in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Compute causal attention over one example; tensors are [1, heads, tokens, head_dim]."""
    tokens = query.shape[2]
    windowed = window is not None and tokens > window
    if not windowed and (query.device.type != "cpu" or query.dtype != torch.bfloat16):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    at = torch.arange(tokens, device=query.device)
    distance = at[:, None] - at
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    # In bfloat16 on a CPU, two matrix products are faster than the fused kernel's backward pass.
    scores = (query @ key.transpose(-1, -2)) * scale
    scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: examples are separated by their bounds."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
