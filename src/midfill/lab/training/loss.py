"""InfillingLoss: the loss of a packed row, with logits only for tokens that are learned."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from midfill.lab.training.distillation import BaseTeacher
from midfill.lab.training.fused_loss import Targets, Teaching, vocabulary_loss
from midfill.lab.training.packing import PackedRow


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
        before = torch.from_numpy(learned).to(device)
        hidden = causal.get_decoder()(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=row.cu_seqlens.tolist(),
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
