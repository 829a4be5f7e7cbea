"""The model that is trained computes what transformers computes, row by row and packed."""

import math
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import TRAINED, VOCAB, reference_model, write_variant

from midfill.errors import MidfillError
from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.training.base_model import load_base_model, packed_attention

LENGTHS = (50, 1, 30, 70)  # longer than every sliding window, and a single token


@pytest.fixture(scope="module", params=TRAINED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp("base") / request.param)


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    ids = np.random.default_rng(seed).integers(0, VOCAB, length)
    return torch.from_numpy(ids)[None]


def bounds(starts: list[int]) -> dict[str, Any]:
    longest = max(stop - start for start, stop in pairwise(starts))
    return {"cu_seq_lens_q": torch.tensor(starts, dtype=torch.int32), "max_length_q": longest}


def logits_of(model: torch.nn.Module, ids: torch.Tensor, starts: list[int]) -> torch.Tensor:
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(starts)])
    with torch.inference_mode():
        logits: torch.Tensor = model(
            input_ids=ids, position_ids=positions[None], **bounds(starts), use_cache=False
        ).logits
    return logits


def test_logits_of_a_row_are_those_of_transformers(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    ids = tokens(max(LENGTHS))
    model = load_base_model(checkpoint, torch.float32)
    with torch.inference_mode():
        expected = reference_model(folder, checkpoint.config.context)(ids, use_cache=False).logits
    torch.testing.assert_close(
        logits_of(model, ids, [0, max(LENGTHS)]), expected, atol=1e-5, rtol=1e-5
    )


def test_examples_of_a_packed_row_do_not_attend_to_each_other(folder: Path) -> None:
    model = load_base_model(open_checkpoint(folder), torch.float32)
    parts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    starts = [0, *accumulate(LENGTHS)]
    packed = logits_of(model, torch.cat(parts, dim=1), starts)
    for (start, stop), part in zip(pairwise(starts), parts, strict=True):
        alone = logits_of(model, part, [0, stop - start])
        torch.testing.assert_close(packed[:, start:stop], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "family", ["gemma", "gemma3", "gemma3n", "granitehybrid", "olmo3", "qwen3moe"]
)
def test_families_that_cannot_be_trained_are_refused(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(write_variant(family, tmp_path))
    with pytest.raises(MidfillError, match=f"family {family} can't be trained here yet"):
        load_base_model(checkpoint, torch.float32)


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
        **bounds(STARTS),
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
        torch.nn.Module(), *tensors, None, **bounds(STARTS), sliding_window=window
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
    result, _ = packed_attention(torch.nn.Module(), *tensors, None, **bounds(STARTS))
    for start, stop in pairwise(STARTS):
        gradients = torch.autograd.grad(result[:, start:stop].sum(), tensors, retain_graph=True)
        for gradient in gradients:
            outside = torch.ones(STARTS[-1], dtype=torch.bool)
            outside[start:stop] = False
            assert not gradient[:, :, outside].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 5])
def test_a_gpus_attention_and_gradients_are_close_to_float32(window: int | None) -> None:
    tensors = [each.detach().cuda().requires_grad_() for each in inputs(2, torch.bfloat16)]
    starts = [*STARTS, STARTS[-1], STARTS[-1]]  # empty examples, as padding has them
    on_gpu = bounds(starts) | {"cu_seq_lens_q": torch.tensor(starts, dtype=torch.int32).cuda()}
    result, _ = packed_attention(torch.nn.Module(), *tensors, None, **on_gpu, sliding_window=window)
    precise = [each.detach().float().cpu().requires_grad_() for each in tensors]
    expected = naive(*precise, 1 / math.sqrt(8), window)
    torch.testing.assert_close(result.float().cpu(), expected, atol=0.03, rtol=0.03)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad(result, tensors, direction.bfloat16().cuda()),
        torch.autograd.grad(expected, precise, direction),
        strict=True,
    ):
        torch.testing.assert_close(ours.float().cpu(), theirs, atol=0.06, rtol=0.06)
