"""Distillation: the divergence from what the base says of the same text without the suffix."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_variant

from midfill.infill.formats import custom_format
from midfill.lab.training.base_model import load_base_model
from midfill.lab.training.distillation import BaseTeacher
from midfill.lab.training.examples import Example, ExampleMaker
from midfill.lab.training.holes import Hole
from midfill.lab.training.loss import InfillingLoss
from midfill.lab.training.packing import PackedRow
from midfill.lab.training.recipe import DataRecipe
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint

END = 0
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
TEXT = "def total(values):\n    # été 漢字\n    return sum(values)\n\nprint(total([1, 2]))\n"


@pytest.fixture(params=["llama-tied", "granite"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_variant(request.param, tmp_path))


def examples(checkpoint: Checkpoint, **recipe: Any) -> list[Example]:
    format = custom_format(*FIM, checkpoint.tokenizer.special_tokens)
    maker = ExampleMaker(checkpoint.tokenizer, format, END, DataRecipe(**recipe), plain_text=True)
    holes = [
        Hole("line", 0, 40, 54, len(TEXT), 19, "planned"),
        Hole("span", 4, 60, 64, 70, 0, "spm"),
        Hole("nothing", 0, 54, 54, len(TEXT), 10, "efim"),
    ]
    return [maker.make(TEXT, hole, random.Random(1), fragments=True) for hole in holes]


def test_aligned_tokens_follow_the_same_text(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.tokenizer
    for example in examples(checkpoint, fragment_share=1.0, caret_share=1.0):
        hole = example.hole
        plain = TEXT[hole.start : hole.end]
        assert tokenizer.decode(example.plain_ids.tolist()) == plain
        assert len(example.aligned)
        written = np.flatnonzero(example.weights)[0]
        for at, plain_at in example.aligned.tolist():
            assert example.weights[at] > 0
            assert example.ids[at] != END
            before = tokenizer.decode(example.plain_ids[:plain_at].tolist())
            increment = tokenizer.decode(example.ids[written:at].tolist())
            assert before.endswith(increment)


def test_without_cuts_every_learned_token_but_the_end_is_aligned(checkpoint: Checkpoint) -> None:
    for example in examples(checkpoint, fragment_share=0.0, typed_share=0.0, caret_share=0.0):
        if example.hole.layout == "spm":
            learned = np.flatnonzero(example.weights)[:-1]
            # The base says nothing about the very first token of a text.
            assert example.aligned[:, 0].tolist() == learned[1:].tolist()


def naive_divergence(checkpoint: Checkpoint, model: Any, teacher: Any, example: Example) -> float:
    def logits(of: Any, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found = of(
                input_ids=torch.tensor([ids]),
                position_ids=torch.arange(len(ids))[None],
                cu_seq_lens_q=[0, len(ids)],
                use_cache=False,
            ).logits[0, -1]
        keep = torch.arange(len(found)) != END
        return torch.log_softmax(found[keep], 0)

    total = 0.0
    for at, plain_at in example.aligned.tolist():
        student = logits(model, example.ids[:at].tolist())
        base = logits(teacher, example.plain_ids[:plain_at].tolist())
        total += float(example.weights[at]) * float((base.exp() * (base - student)).sum())
    return total


def test_the_loss_grows_by_the_weighted_divergence(checkpoint: Checkpoint) -> None:
    base = load_base_model(checkpoint, torch.float32)
    model = load_base_model(checkpoint, torch.float32)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.02 * torch.randn(each.shape, generator=torch.Generator().manual_seed(0)))
    made = examples(checkpoint)
    row = PackedRow.pack(made)
    plain = float(InfillingLoss(model, END)(row).detach())
    guarded = float(InfillingLoss(model, END, BaseTeacher(base), 0.7)(row).detach())
    expected = sum(naive_divergence(checkpoint, model, base, each) for each in made)
    assert expected > 0
    assert guarded - plain == pytest.approx(0.7 * expected, rel=1e-3)
