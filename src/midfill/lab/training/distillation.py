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

from midfill.lab.training.packing import PackedRow


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
            cu_seq_lens_q=row.plain_cu_seqlens.tolist(),
        ).last_hidden_state
        return hidden[0, before]
