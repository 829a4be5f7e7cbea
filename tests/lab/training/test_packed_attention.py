"""Packed attention computes plain causal attention inside each example, and its gradients."""

import math
from itertools import pairwise

import pytest
import torch

from midfill.lab.training.packed_attention import packed_attention

STARTS = [0, 9, 10, 24]


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Attend query by query, head by head; return [1, tokens, heads, head_dim]."""
    _, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    rows = []
    for at in range(tokens):
        first = max(start for start in STARTS if start <= at)
        if window is not None:
            first = max(first, at - window + 1)
        for head in range(heads):
            keys, values = (each[0, head // groups, first : at + 1] for each in (key, value))
            weights = torch.softmax(keys @ query[0, head, at] * scale, 0)
            rows.append(weights @ values)
    return torch.stack(rows).reshape(1, tokens, heads, width)


def inputs(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, STARTS[-1], 8), (1, kv_heads, STARTS[-1], 8), (1, kv_heads, STARTS[-1], 8)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [each.requires_grad_() for each in made]


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_float32_attention_and_gradients_are_those_of_a_naive_reference(
    window: int | None, kv_heads: int, scale: float | None
) -> None:
    tensors = inputs(kv_heads, torch.float32)
    result, weights = packed_attention(
        torch.nn.Module(),
        *tensors,
        None,
        cu_seq_lens_q=STARTS,
        scaling=scale,
        sliding_window=window,
    )
    expected = naive(*tensors, scale or 1 / math.sqrt(8), window)
    assert weights is None
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad(result, tensors, direction),
        torch.autograd.grad(expected, tensors, direction),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 5])
def test_bfloat16_attention_and_gradients_are_close_to_float32(window: int | None) -> None:
    tensors = inputs(2, torch.bfloat16)
    result, _ = packed_attention(
        torch.nn.Module(), *tensors, None, cu_seq_lens_q=STARTS, sliding_window=window
    )
    precise = [each.detach().float().requires_grad_() for each in tensors]
    expected = naive(*precise, 1 / math.sqrt(8), window)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, atol=0.03, rtol=0.03)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad(result, tensors, direction.bfloat16()),
        torch.autograd.grad(expected, precise, direction),
        strict=True,
    ):
        torch.testing.assert_close(ours.float(), theirs, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_crosses_an_example(dtype: torch.dtype) -> None:
    tensors = inputs(2, dtype)
    result, _ = packed_attention(torch.nn.Module(), *tensors, None, cu_seq_lens_q=STARTS)
    for start, stop in pairwise(STARTS):
        gradients = torch.autograd.grad(result[:, start:stop].sum(), tensors, retain_graph=True)
        for gradient in gradients:
            outside = torch.ones(STARTS[-1], dtype=torch.bool)
            outside[start:stop] = False
            assert not gradient[:, :, outside].any()
