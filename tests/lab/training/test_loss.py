"""The loss of a packed row is the weighted sum over its separate examples."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, write_variant

from midfill.lab.training.base_model import load_base_model
from midfill.lab.training.lora import make_trainable
from midfill.lab.training.loss import InfillingLoss
from midfill.lab.training.packing import PackedRow
from midfill.lab.training.recipe import TrainingRecipe
from midfill.models.checkpoints.opening import open_checkpoint

END = 5


def row(*lengths: int) -> PackedRow:
    draw = np.random.default_rng(0)
    total = sum(lengths)
    weights = draw.choice([0.0, 0.5, 1.0], total).astype(np.float32)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    weights[starts[:-1]] = 0.0
    ids = draw.integers(0, VOCAB, total).astype(np.int32)
    typed = (draw.random(total) < 0.5) & (ids != END)
    return PackedRow(ids, weights, typed, starts, total)


def naive(model: torch.nn.Module, row: PackedRow) -> float:
    """Compute the loss example by example, token by token."""
    total = 0.0
    for start, stop in pairwise(row.cu_seqlens.tolist()):
        ids = torch.from_numpy(row.ids[start:stop].astype(np.int64))[None]
        positions = torch.arange(stop - start)[None]
        with torch.inference_mode():
            logits = model(
                input_ids=ids,
                position_ids=positions,
                cu_seq_lens_q=[0, stop - start],
                use_cache=False,
            ).logits[0]
        for at in range(start + 1, stop):
            choices = logits[at - start - 1].clone()
            if row.without_end[at]:
                choices[END] = float("-inf")
            likelihood = torch.log_softmax(choices, 0)[row.ids[at]]
            total -= float(row.weights[at]) * float(likelihood)
    return total


@pytest.fixture(params=["llama-tied", "granite", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return load_base_model(open_checkpoint(write_variant(request.param, tmp_path)), torch.float32)


def test_the_sum_is_that_of_a_naive_reference(model: torch.nn.Module) -> None:
    packed = row(9, 30, 2, 14)
    assert packed.without_end.any()
    loss = InfillingLoss(model, END)(packed)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(naive(model, packed), rel=1e-5)


def test_it_is_the_same_behind_peft(model: torch.nn.Module) -> None:
    packed = row(9, 30)
    plain = float(InfillingLoss(model, END)(packed).detach())
    adapted = make_trainable(model, TrainingRecipe(rank=2), [1, 2, 3])
    assert float(InfillingLoss(adapted, END)(packed).detach()) == pytest.approx(plain, rel=1e-6)


def test_the_increment_has_no_gradient_for_the_end_token(model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    output = model.get_output_embeddings().weight
    model.get_output_embeddings().weight = torch.nn.Parameter(output.detach().clone())
    packed = row(9, 30, 14)
    packed.without_end[:] = True
    packed.ids[packed.ids == END] = END + 1
    InfillingLoss(model, END)(packed).backward()
    gradient = model.get_output_embeddings().weight.grad
    assert not gradient[END].any()
    assert gradient[END + 1].any()


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("llama-tied", tmp_path))
    gradients = []
    for checkpointing in (False, True):
        recipe = TrainingRecipe(rank=2, gradient_checkpointing=checkpointing)
        model = make_trainable(load_base_model(checkpoint, torch.float32), recipe, [1, 2, 3])
        InfillingLoss(model, END)(row(9, 30)).backward()
        gradients.append(
            {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, each in gradients[0].items():
        torch.testing.assert_close(each, gradients[1][name])
