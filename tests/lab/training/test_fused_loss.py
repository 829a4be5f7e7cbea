"""The fused loss and its gradients are those of autograd over whole logits."""

import pytest
import torch

from midfill.lab.training import fused_loss
from midfill.lab.training.fused_loss import Targets, Teaching, vocabulary_loss

N, HIDDEN, VOCAB, END = 150, 16, 50, 3


def targets(divisor: float) -> Targets:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (N,), generator=draw)
    without_end = (torch.rand(N, generator=draw) < 0.5) & (ids != END)
    return Targets(ids, torch.rand(N, generator=draw), without_end, END, divisor)


def teaching() -> Teaching:
    draw = torch.Generator().manual_seed(1)
    weights = torch.rand(N, generator=draw) * (torch.rand(N, generator=draw) < 0.7)
    rows = torch.randn((N, HIDDEN), generator=draw)
    return Teaching(rows, torch.randn((VOCAB, HIDDEN), generator=draw), weights)


def naive(
    hidden: torch.Tensor, head: torch.Tensor, targets: Targets, teaching: Teaching | None
) -> torch.Tensor:
    logits = hidden @ head.T / targets.logits_divisor
    is_end = torch.arange(VOCAB) == END
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
    head = torch.randn((VOCAB, HIDDEN), generator=draw).requires_grad_()
    what = targets(divisor), teaching() if taught else None
    expected, found = naive(hidden, head, *what), vocabulary_loss(hidden, head, *what)
    torch.testing.assert_close(found, expected)
    for theirs, ours in zip(
        torch.autograd.grad(3 * expected, (hidden, head)),
        torch.autograd.grad(3 * found, (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_chunks_don_t_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(2)
    hidden, head = torch.randn((N, HIDDEN), generator=draw), torch.randn((VOCAB, HIDDEN))
    whole = vocabulary_loss(hidden, head, targets(1.0), teaching())
    monkeypatch.setattr(fused_loss, "_CHUNK", 7)
    torch.testing.assert_close(vocabulary_loss(hidden, head, targets(1.0), teaching()), whole)


def test_nothing_learned_is_no_loss() -> None:
    none = Targets(
        torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(0, dtype=torch.bool), END
    )
    assert float(vocabulary_loss(torch.zeros(0, HIDDEN), torch.zeros(VOCAB, HIDDEN), none)) == 0
