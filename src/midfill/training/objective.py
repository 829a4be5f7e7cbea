"""InfillingLoss: a packed row to its loss, with logits only for the tokens that count."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from midfill.training.packing import PackedRow


class InfillingLoss(nn.Module):
    """Weighted cross entropy of a row's tokens, summed.

    Text that stood before the caret says what comes next but not that the answer goes on: the
    model is never asked there. So among such tokens the end token is no choice; were it one, long
    increments would teach the model to run on where an answer is over.

    Args:
        model: a transformers causal model, or PEFT's wrapper around one.
        end_token_id: what ends an answer.
    """

    def __init__(self, model: Any, end_token_id: int) -> None:
        super().__init__()
        self.model = model
        self.end_token_id = end_token_id

    def forward(self, row: PackedRow) -> torch.Tensor:
        """The sum over the row of weight x negative log likelihood, in nats; a float32 scalar."""
        causal = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        device = causal.get_input_embeddings().weight.device
        ids = torch.from_numpy(row.ids.astype(np.int64)).to(device)
        positions = torch.from_numpy(row.positions.astype(np.int64)).to(device)
        counted = np.flatnonzero(row.weights[1:] > 0)
        weights = torch.from_numpy(row.weights[1:][counted]).to(device)
        before = torch.from_numpy(counted).to(device)
        typed = torch.from_numpy(row.typed[1:][counted]).to(device)
        hidden = causal.get_decoder()(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=row.starts.tolist(),
        ).last_hidden_state
        logits = causal.get_output_embeddings()(hidden[0, before]).float()
        logits = logits / float(getattr(causal.config, "logits_scaling", 1.0))
        with torch.no_grad():  # a choice without probability has no gradient either
            logits[typed, self.end_token_id] = float("-inf")
        losses = cross_entropy(logits, ids[before + 1], reduction="none")
        return (losses * weights).sum()
