"""InfillingLoss: the loss of a packed row, with logits only for tokens that are learned.

It is fused with the output layer: logits exist for a few tokens at a time. Autograd would keep some
ten arrays of tokens x vocabulary. Here each chunk's logits become its loss and its gradient at
once, in place. With p = softmax(z) and the base's distribution q,

    cross entropy      -log p[target]               has the gradient  p - onehot(target)
    divergence         sum q (log q - log p')       has the gradient  p' - q

in the logits z, where p' is p without the end token. In increments p leaves it out, too.

The divergence distils the base: what it would write without the suffix guards what it knew.
Learning to infill from a few million tokens costs a model some of what it learned from trillions.
Where the base has the same text before it, plainly, its distribution over the next token is a
second target beside the text itself: the loss gains weight x KL(base || model) (Hinton et al.,
"Distilling the Knowledge in a Neural Network", arXiv 1503.02531, at temperature 1). The base never
ends an answer, so the end token is left out of both distributions: when to stop is learned from the
text alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.linalg import vecdot
from torch.nn.functional import linear

from midfill_lab.training.examples import PackedRow

_CPU_CHUNK = 64  # tokens; their logits stay in the last-level cache
_GPU_CHUNK = 8192  # tokens; their logits fill the GPU, and take 1.6 GB of 50,000 entries each


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
        cpu = hidden.device.type == "cpu"
        chunk, compute = (
            (_CPU_CHUNK, _loss_and_gradient) if cpu else (_GPU_CHUNK, _compiled_loss_and_gradient())
        )
        for first in range(0, len(hidden), chunk):
            part = slice(first, first + chunk)
            rows = hidden[part].to(head.dtype)
            part_loss, gradient = compute(rows, head, targets, teaching, part)
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


@cache
def _compiled_loss_and_gradient() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the function compiled: a GPU then reads and writes the logits a few times only."""
    return torch.compile(_loss_and_gradient, dynamic=True)


def _logits(rows: torch.Tensor, head: torch.Tensor, divisor: float) -> torch.Tensor:
    logits = linear(rows.to(head.dtype), head).float()
    return logits.div_(divisor) if divisor != 1.0 else logits


class BaseTeacher:
    """The frozen base.

    Args:
        model: a transformers causal model with attention over packed rows; it is not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model.requires_grad_(False)

    @property
    def head(self) -> torch.Tensor:
        """The base's output layer: [vocab, hidden]."""
        weight: torch.Tensor = self._model.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def hidden_rows(self, row: PackedRow) -> torch.Tensor:
        """Return the last hidden rows from which aligned tokens are predicted: [pairs, hidden]."""
        ids, positions, before = (
            torch.from_numpy(each.astype(np.int64)).to(self.head.device)
            for each in (row.plain_ids, row.plain_positions, row.aligned[:, 1] - 1)
        )
        hidden: torch.Tensor = self._model.get_decoder()(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=torch.from_numpy(row.plain_cu_seqlens).to(self.head.device),
            max_length_q=int(np.diff(row.plain_cu_seqlens).max(initial=0)),
        ).last_hidden_state
        return hidden[0, before]


class InfillingLoss(nn.Module):
    """Weighted cross entropy of a row's tokens, summed.

    Tokens of the increment, before the caret, say what comes next but not that an answer continues
    there: the model never answers in their place. The end token is therefore excluded from their
    softmax. Otherwise long increments would teach the model to continue where an answer ends.

    Args:
        model: a transformers causal model, or PEFT's wrapper around one.
        end_token_id: the token that ends an answer.
        teacher: the base; None trains without distillation.
        distillation: weight of the divergence from the teacher.
        max_length: of an example, in tokens; None looks at each row. Compiled layers are compiled
            again for each value they see.
    """

    def __init__(
        self,
        model: Any,
        end_token_id: int,
        teacher: BaseTeacher | None = None,
        distillation: float = 0.0,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.end_token_id = end_token_id
        self.teacher = teacher
        self.distillation = distillation
        self.max_length = max_length

    def forward(self, row: PackedRow) -> torch.Tensor:
        """Return the row's loss in nats, a float32 scalar.

        It is the sum of weight x (negative log likelihood + distillation x divergence).
        """
        causal = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        device = causal.get_input_embeddings().weight.device
        ids = torch.from_numpy(row.ids.astype(np.int64)).to(device)
        positions = torch.from_numpy(row.positions.astype(np.int64)).to(device)
        learned = np.flatnonzero(row.weights[1:] > 0)
        before = torch.from_numpy(learned).to(device)
        hidden = causal.get_decoder()(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=torch.from_numpy(row.cu_seqlens).to(device),
            max_length_q=self.max_length or int(np.diff(row.cu_seqlens).max(initial=0)),
        ).last_hidden_state[0, before]
        targets = Targets(
            ids[before + 1],
            torch.from_numpy(row.weights[1:][learned]).to(device),
            torch.from_numpy(row.without_end[1:][learned]).to(device),
            self.end_token_id,
            float(getattr(causal.config, "logits_scaling", 1.0)),
        )
        teaching = self._teaching(row, learned, targets.weights)
        return vocabulary_loss(hidden, self._head(causal), targets, teaching)

    def _teaching(
        self, row: PackedRow, learned: npt.NDArray[np.intp], weights: torch.Tensor
    ) -> Teaching | None:
        """Return what the base says at the learned positions; nothing where it has no say."""
        if self.teacher is None or not len(row.aligned):
            return None
        at = torch.from_numpy(np.searchsorted(learned, row.aligned[:, 0] - 1)).to(weights.device)
        rows = self.teacher.hidden_rows(row)
        hidden = rows.new_zeros((len(learned), rows.shape[1]))
        hidden[at] = rows
        diverging = torch.zeros_like(weights)
        diverging[at] = self.distillation * weights[at]
        return Teaching(hidden, self.teacher.head, diverging)

    def _head(self, causal: Any) -> torch.Tensor:
        """Return the output layer's weight: [vocab, hidden].

        Beside LoRA it has no gradient: sentinels are only read, since no answer has one.
        """
        weight: torch.Tensor = causal.get_output_embeddings().weight
        return weight if causal is self.model else weight.detach()
