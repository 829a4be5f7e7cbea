"""Quantization-aware training of LoRA updates over a quantised base.

Serving merges a LoRA update into a quantised base by requantising the sum (see
``models.checkpoints.lora_merge``), which adds rounding error that training in floats never
sees. In the last part of a run, the frozen weights W are therefore replaced by Q(W + update) -
update, where Q rounds as serving does. The forward pass then computes with Q(W + update), the
weights that are served, and the update learns to compensate the error. Q has no useful gradient. It
is passed over by the straight-through estimator (Bengio et al., 2013): the error is a constant of
the frozen weights. Q dithers every weight with a fixed number, so a small change of the update
changes few codes, and the error stays nearly the same between two requantisations.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.lora_merge import BLOCK_LAYOUTS, Rounding, add_to_quantized
from midfill.models.families import huggingface_names

QAT_ROUNDING: Rounding = "stochastic"
"""The rounding rule of quantization-aware training; serving must use the same."""


class QuantizationAwareLora:
    """The LoRA layers over the quantised matrices of a base.

    Args:
        checkpoint: the base.
        layers: PEFT's layers by the canonical names of their matrices.
    """

    def __init__(self, checkpoint: Checkpoint, layers: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._layers = layers

    @classmethod
    def find(cls, model: Any, checkpoint: Checkpoint) -> "QuantizationAwareLora | None":
        """Find a model's LoRA layers over quantised matrices; return None if it has none.

        Args:
            model: PEFT's wrapper of the model, its base weights those of ``checkpoint``.
            checkpoint: the base.
        """
        names = {theirs: ours for ours, theirs in huggingface_names(checkpoint.config).items()}
        layers = {
            names[f"{path}.weight"]: module
            for path, module in model.get_base_model().named_modules()
            if f"{path}.weight" in names and hasattr(module, "lora_A")
        }
        quantised = {
            name: module
            for name, module in layers.items()
            if checkpoint.tensor(name).kind in BLOCK_LAYOUTS
        }
        return cls(checkpoint, quantised) if quantised else None

    @torch.no_grad()
    def requantise(self) -> float:
        """Replace the frozen weights W by Q(W + update) - update, with the current updates.

        Returns:
            Root mean square of the rounding error, relative to that of the updates.
        """
        error = signal = 0.0
        for name, module in self._layers.items():
            update = module.get_delta_weight("default").float().cpu().numpy()
            stored = self._checkpoint.tensor(name)
            frozen = add_to_quantized(stored, update, QAT_ROUNDING).to_float32() - update
            error += float(np.square(frozen - stored.to_float32()).sum())
            signal += float(np.square(update).sum())
            module.get_base_layer().weight.copy_(torch.from_numpy(frozen))
        return (error / signal) ** 0.5 if signal else 0.0
