"""The loss of a packed row is the weighted sum over its separate examples."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, write_variant

from midfill.infill.formats import custom_format
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.training import loss as loss_module
from midfill_lab.training.base_model import load_base_model
from midfill_lab.training.examples import Example, ExampleMaker, PackedRow
from midfill_lab.training.holes import Hole
from midfill_lab.training.lora import make_trainable
from midfill_lab.training.loss import BaseTeacher, InfillingLoss, Targets, Teaching, vocabulary_loss
from midfill_lab.training.recipe import DataRecipe, TrainingRecipe

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
                cu_seq_lens_q=torch.tensor([0, stop - start], dtype=torch.int32),
                max_length_q=stop - start,
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


N, HIDDEN, WORDS, LAST = 150, 16, 50, 3


def targets(divisor: float) -> Targets:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (N,), generator=draw)
    without_end = (torch.rand(N, generator=draw) < 0.5) & (ids != LAST)
    return Targets(ids, torch.rand(N, generator=draw), without_end, LAST, divisor)


def teaching() -> Teaching:
    draw = torch.Generator().manual_seed(1)
    weights = torch.rand(N, generator=draw) * (torch.rand(N, generator=draw) < 0.7)
    rows = torch.randn((N, HIDDEN), generator=draw)
    return Teaching(rows, torch.randn((WORDS, HIDDEN), generator=draw), weights)


def naive_fused(
    hidden: torch.Tensor, head: torch.Tensor, targets: Targets, teaching: Teaching | None
) -> torch.Tensor:
    logits = hidden @ head.T / targets.logits_divisor
    is_end = torch.arange(WORDS) == LAST
    excluded = logits.masked_fill(targets.without_end[:, None] & is_end, float("-inf"))
    entropy = torch.nn.functional.cross_entropy(excluded, targets.ids, reduction="none")
    loss = (entropy * targets.weights).sum()
    if teaching is None:
        return loss
    student = logits[:, ~is_end].log_softmax(-1)
    base = (teaching.hidden @ teaching.head.T / targets.logits_divisor)[:, ~is_end].log_softmax(-1)
    return loss + ((base.exp() * (base - student)).sum(-1) * teaching.weights).sum()


@pytest.mark.parametrize("divisor", [1.0, 4.0])
@pytest.mark.parametrize("taught", [False, True])
def test_loss_and_gradients(divisor: float, taught: bool) -> None:
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn((N, HIDDEN), generator=draw).requires_grad_()
    head = torch.randn((WORDS, HIDDEN), generator=draw).requires_grad_()
    what = targets(divisor), teaching() if taught else None
    expected, found = (
        naive_fused(hidden, head, *what),
        vocabulary_loss(hidden, head, *what),
    )
    torch.testing.assert_close(found, expected)
    for theirs, ours in zip(
        torch.autograd.grad(3 * expected, (hidden, head)),
        torch.autograd.grad(3 * found, (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_chunks_don_t_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(2)
    hidden, head = torch.randn((N, HIDDEN), generator=draw), torch.randn((WORDS, HIDDEN))
    whole = vocabulary_loss(hidden, head, targets(1.0), teaching())
    monkeypatch.setattr(loss_module, "_CPU_CHUNK", 7)
    torch.testing.assert_close(vocabulary_loss(hidden, head, targets(1.0), teaching()), whole)


def test_nothing_learned_is_no_loss() -> None:
    none = Targets(
        torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(0, dtype=torch.bool), LAST
    )
    assert float(vocabulary_loss(torch.zeros(0, HIDDEN), torch.zeros(WORDS, HIDDEN), none)) == 0


STOP = 0
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
TEXT = "def total(values):\n    # été 漢字\n    return sum(values)\n\nprint(total([1, 2]))\n"


@pytest.fixture(params=["llama-tied", "granite"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_variant(request.param, tmp_path))


def examples(checkpoint: Checkpoint, **recipe: Any) -> list[Example]:
    format = custom_format(*FIM, checkpoint.tokenizer.special_tokens)
    maker = ExampleMaker(checkpoint.tokenizer, format, STOP, DataRecipe(**recipe), plain_text=True)
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
            assert example.ids[at] != STOP
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
                cu_seq_lens_q=torch.tensor([0, len(ids)], dtype=torch.int32),
                max_length_q=len(ids),
                use_cache=False,
            ).logits[0, -1]
        keep = torch.arange(len(found)) != STOP
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
    plain = float(InfillingLoss(model, STOP)(row).detach())
    guarded = float(InfillingLoss(model, STOP, BaseTeacher(base), 0.7)(row).detach())
    expected = sum(naive_divergence(checkpoint, model, base, each) for each in made)
    assert expected > 0
    assert guarded - plain == pytest.approx(0.7 * expected, rel=1e-3)
