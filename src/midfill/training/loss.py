"""InfillingLoss: the loss of a packed row, with logits only for tokens that are learned."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from midfill.training.distillation import BaseTeacher, divergence
from midfill.training.packing import PackedRow


class InfillingLoss(nn.Module):
    """Weighted cross entropy of a row's tokens, summed.

    Tokens of the increment, before the caret, say what comes next but not that an answer continues
    there: the model never answers in their place. The end token is therefore excluded from their
    softmax. Otherwise long increments would teach the model to continue where an answer ends.

    Args:
        model: a transformers causal model, or PEFT's wrapper around one.
        end_token_id: the token that ends an answer.
        teacher: the base; None trains without distillation.
        distillation: weight of the divergence from the teacher, see ``distillation``.
    """

    def __init__(
        self,
        model: Any,
        end_token_id: int,
        teacher: BaseTeacher | None = None,
        distillation: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.end_token_id = end_token_id
        self.teacher = teacher
        self.distillation = distillation

    def forward(self, row: PackedRow) -> torch.Tensor:
        """Return the row's loss in nats, a float32 scalar.

        It is the sum of weight x (negative log likelihood + distillation x divergence).
        """
        causal = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        device = causal.get_input_embeddings().weight.device
        ids = torch.from_numpy(row.ids.astype(np.int64)).to(device)
        positions = torch.from_numpy(row.positions.astype(np.int64)).to(device)
        learned = np.flatnonzero(row.weights[1:] > 0)
        weights = torch.from_numpy(row.weights[1:][learned]).to(device)
        before = torch.from_numpy(learned).to(device)
        in_increment = torch.from_numpy(row.in_increment[1:][learned]).to(device)
        hidden = causal.get_decoder()(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=row.cu_seqlens.tolist(),
        ).last_hidden_state
        logits = causal.get_output_embeddings()(hidden[0, before]).float()
        logits = logits / float(getattr(causal.config, "logits_scaling", 1.0))
        with torch.no_grad():  # a token with probability 0 has no gradient either
            logits[in_increment, self.end_token_id] = float("-inf")
        losses = cross_entropy(logits, ids[before + 1], reduction="none")
        loss = (losses * weights).sum()
        if self.teacher is None or not len(row.aligned):
            return loss
        aligned = torch.from_numpy(np.searchsorted(learned, row.aligned[:, 0] - 1)).to(device)
        diverged = divergence(logits[aligned], self.teacher.logits(row), self.end_token_id)
        return loss + self.distillation * (diverged * weights[aligned]).sum()
