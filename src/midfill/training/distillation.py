"""Distillation from the base: what it would write without the suffix guards what it knew.

Learning to infill from a few million tokens costs a model some of what it learned from trillions.
Where the base has the same text before it, plainly, its distribution over the next token is a
second target beside the text itself: the loss gains weight x KL(base || model) (Hinton et al.,
"Distilling the Knowledge in a Neural Network", arXiv 1503.02531, at temperature 1). The base never
ends an answer, so the end token is left out of both distributions: when to stop is learned from the
text alone.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from midfill.training.packing import PackedRow

_NEVER = -1e9  # a finite logit, so that 0 x log 0 is 0


class BaseTeacher:
    """The frozen base.

    Args:
        model: a transformers causal model with attention over packed rows; it is not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model.requires_grad_(False)

    @torch.no_grad()
    def logits(self, row: PackedRow) -> torch.Tensor:
        """Return the base's logits for a row's aligned tokens: float32 [pairs, vocab]."""
        embeddings = self._model.get_input_embeddings().weight
        ids, positions, before = (
            torch.from_numpy(each.astype(np.int64)).to(embeddings.device)
            for each in (row.plain_ids, row.plain_positions, row.aligned[:, 1] - 1)
        )
        hidden = self._model.get_decoder()(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=row.plain_cu_seqlens.tolist(),
        ).last_hidden_state
        head: torch.Tensor = self._model.get_output_embeddings().weight
        logits = linear(hidden[0, before].to(head.dtype), head).float()
        return logits / float(getattr(self._model.config, "logits_scaling", 1.0))


def divergence(logits: torch.Tensor, teacher: torch.Tensor, end_token_id: int) -> torch.Tensor:
    """Return KL(teacher || student) per token, in nats, with the end token left out of both.

    Args:
        logits, teacher: float32 [tokens, vocab].
        end_token_id: the token that ends an answer.
    """
    end = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    end[end_token_id] = True
    student = logits.masked_fill(end, _NEVER).log_softmax(-1)
    expected = teacher.masked_fill(end, _NEVER).log_softmax(-1)
    return (expected.exp() * (expected - student)).sum(-1)
