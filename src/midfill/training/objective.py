"""InfillingLoss: a packed row to its loss, with logits only for the tokens that count."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from midfill.training.packing import PackedRow


class InfillingLoss(nn.Module):
    """Weighted cross entropy of a row's tokens, summed.

    Args:
        model: a transformers causal model, or PEFT's wrapper around one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, row: PackedRow) -> torch.Tensor:
        """The sum over the row of weight x negative log likelihood, in nats; a float32 scalar."""
        causal = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        device = causal.get_input_embeddings().weight.device
        ids = torch.from_numpy(row.ids.astype(np.int64)).to(device)
        positions = torch.from_numpy(row.positions.astype(np.int64)).to(device)
        counted = np.flatnonzero(row.weights[1:] > 0)
        weights = torch.from_numpy(row.weights[1:][counted]).to(device)
        before = torch.from_numpy(counted).to(device)
        hidden = causal.get_decoder()(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=row.starts.tolist(),
        ).last_hidden_state
        logits = causal.get_output_embeddings()(hidden[0, before]).float()
        divisor = float(getattr(causal.config, "logits_scaling", 1.0))
        losses = cross_entropy(logits / divisor, ids[before + 1], reduction="none")
        return (losses * weights).sum()
