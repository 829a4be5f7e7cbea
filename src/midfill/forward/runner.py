"""Runner: the engine's view of a model. It owns the weights and the KV cells of all slots."""

from typing import Protocol

import torch

from midfill.forward.batch import ForwardBatch
from midfill.models.config import ModelConfig


class Runner(Protocol):
    """Runs forward passes over packed batches.

    A runner holds KV for ``slots`` slots and knows nothing of requests: which slot belongs to
    whom is the engine's affair.
    """

    config: ModelConfig

    @property
    def slots(self) -> int:
        """How many tokens' KV there is room for."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cells of all slots."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's K and V into its slots and return logits [outputs, vocab] float32.

        The tensor may be reused by the next call.
        """
        ...
