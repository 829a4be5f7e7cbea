"""The loss over a vocabulary, fused with the output layer: logits exist for a few tokens at a time.

Autograd would keep some ten arrays of tokens x vocabulary. Here each chunk's logits become its loss
and its gradient at once, in place. With p = softmax(z) and the base's distribution q,

    cross entropy      -log p[target]               has the gradient  p - onehot(target)
    divergence         sum q (log q - log p')       has the gradient  p' - q

in the logits z, where p' is p without the end token. In increments p leaves it out, too.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.linalg import vecdot
from torch.nn.functional import linear

_CHUNK = 64  # tokens; their logits stay in the last-level cache
_MAX_SHARE = 1 - 1e-6  # of the end token, when the others are asked for
_NEVER = -1e9  # a finite logit, so that 0 x log 0 is 0


@dataclass(frozen=True)
class Targets:
    """What is learned at each of n positions.

    Attributes:
        ids: int64 [n], the next token.
        weights: float32 [n], of the loss there.
        without_end: bool [n], whether the end token is excluded there.
        end_token_id: the token that ends an answer.
        logits_divisor: of the logits.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    without_end: torch.Tensor
    end_token_id: int
    logits_divisor: float = 1.0


@dataclass(frozen=True)
class Teaching:
    """What the base says at each of n positions.

    Attributes:
        hidden: [n, hidden], its last hidden rows; any where ``weights`` is 0.
        head: [vocab, hidden], its output layer.
        weights: float32 [n], of the divergence there.
    """

    hidden: torch.Tensor
    head: torch.Tensor
    weights: torch.Tensor


def vocabulary_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: Targets, teaching: Teaching | None = None
) -> torch.Tensor:
    """Return the weighted sum of cross entropies and divergences, in nats: a float32 scalar.

    Args:
        hidden: [n, hidden], last hidden rows of the positions.
        head: [vocab, hidden], the output layer.
        targets: what is learned there.
        teaching: what the base says there; None for no divergence.
    """
    loss: torch.Tensor = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, teaching
    )
    return loss


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: Targets,
        teaching: Teaching | None,
    ) -> torch.Tensor:
        """Compute the loss, and the gradients of hidden and head for a loss whose gradient is 1."""
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), device=hidden.device)
        for first in range(0, len(hidden), _CHUNK):
            part = slice(first, first + _CHUNK)
            rows = hidden[part].to(head.dtype)
            part_loss, gradient = _loss_and_gradient(rows, head, targets, teaching, part)
            loss += part_loss
            gradient = gradient.to(head.dtype)
            if d_hidden is not None:
                d_hidden[part] = gradient @ head
            if d_head is not None:
                d_head += gradient.T @ rows
        ctx.save_for_backward(d_hidden, d_head)
        ctx.head_dtype = head.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden and head."""
        d_hidden, d_head = ctx.saved_tensors
        return (
            None if d_hidden is None else d_hidden * gradients[0].to(d_hidden.dtype),
            None if d_head is None else (d_head * gradients[0]).to(ctx.head_dtype),
            None,
            None,
        )


def _loss_and_gradient(
    rows: torch.Tensor,
    head: torch.Tensor,
    targets: Targets,
    teaching: Teaching | None,
    part: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's loss and its gradient in ``rows @ head.T``, float32 [chunk, vocab]."""
    ids, weights, excluded = targets.ids[part], targets.weights[part], targets.without_end[part]
    end, divisor = targets.end_token_id, targets.logits_divisor
    z = _logits(rows, head, divisor)
    z[:, end].masked_fill_(excluded, _NEVER)
    total = z.logsumexp(-1)
    loss = ((total - z.gather(1, ids[:, None])[:, 0]) * weights).sum()
    factor = weights[:, None]
    end_share = (z[:, end] - total).exp()
    if teaching is not None:
        diverging = teaching.weights[part]
        q = _logits(teaching.hidden[part], teaching.head, divisor)
        q[:, end] = _NEVER
        log_q = q.sub_(q.logsumexp(-1, keepdim=True))
        q = log_q.exp()
        total_without_end = total + torch.log1p(-end_share.clamp(max=_MAX_SHARE))
        divergence = vecdot(q, log_q.sub_(z)) + total_without_end
        loss = loss + (divergence * diverging).sum()
        factor = factor + (diverging / (1 - end_share.clamp(max=_MAX_SHARE)))[:, None]
    gradient = z.sub_(total[:, None]).exp_().mul_(factor)
    if teaching is not None:
        gradient.addcmul_(q, diverging[:, None], value=-1.0)
    gradient[:, end] = end_share * weights
    gradient[torch.arange(len(ids), device=ids.device), ids] -= weights
    return loss, gradient.div_(divisor) if divisor != 1.0 else gradient


def _logits(rows: torch.Tensor, head: torch.Tensor, divisor: float) -> torch.Tensor:
    logits = linear(rows.to(head.dtype), head).float()
    return logits.div_(divisor) if divisor != 1.0 else logits
