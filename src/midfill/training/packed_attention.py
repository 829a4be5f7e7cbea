"""Attention over packed rows: every example by itself, so nothing is computed across examples.

Registered with transformers under ``PACKED_ATTENTION``. The bounds of the examples come as
``cu_seq_lens_q``, the name transformers' own packed attention uses.
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
    """Causal attention inside each example.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim].
        attention_mask: none is ever made.
        cu_seq_lens_q: where each example begins, and where the last one ends.
        scaling: of the scores; None is head_dim ** -0.5.
        sliding_window: keys a query sees at most, its own included.

    Returns:
        [1, tokens, heads, head_dim], and no weights.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lengths = [stop - start for start, stop in pairwise(cu_seq_lens_q)]
    queries, keys, values = (torch.split(each, lengths, dim=2) for each in (query, key, value))
    parts = [
        _attend(*of_one, scale, sliding_window)
        for of_one in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention over one example; all are [1, heads, tokens, head_dim]."""
    tokens = query.shape[2]
    windowed = window is not None and tokens > window
    if not windowed and (query.device.type != "cpu" or query.dtype != torch.bfloat16):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    at = torch.arange(tokens, device=query.device)
    distance = at[:, None] - at
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    # In bfloat16 on a CPU two matrix products are faster than the fused kernel's backward pass.
    scores = (query @ key.transpose(-1, -2)) * scale
    scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _no_mask(*_: Any, **__: Any) -> None:
    """Examples are told apart by their bounds, so there is nothing to mask."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
