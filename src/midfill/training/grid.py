"""The grid a quantised base is served on, carried into training.

A LoRA update is merged into a quantised base by rounding onto the base's own grid (see
``models.requantise``), which adds noise that training in floats never saw. So in the last part of a
run the frozen weights W are replaced by round(W + update) - update, with the rounding rule that
serving uses: the model that is trained is then the one that is served, and the update learns to
make up for the noise. Rounding has no gradient; as in Bengio et al. (2013) it is passed over. The
rule dithers every weight with a number of its own, so a small change of the update changes few of
the codes, and the noise stays what it was.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from midfill.checkpoints.checkpoint import Checkpoint
from midfill.checkpoints.requantise import LAYOUTS, Rounding, requantise
from midfill.models.families import huggingface_names

ROUNDING: Rounding = "stochastic"
"""The rule a model is trained for; serving must use the same."""


class BaseGrid:
    """The LoRA layers of a model over a quantised base, and where their weights are stored.

    Args:
        checkpoint: the base.
        layers: PEFT's layers over its quantised matrices, by the matrices' canonical names.
    """

    def __init__(self, checkpoint: Checkpoint, layers: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._layers = layers

    @classmethod
    def of(cls, model: Any, checkpoint: Checkpoint) -> "BaseGrid | None":
        """The grid under a model, None where nothing that is trained is stored quantised.

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
            if checkpoint.tensor(name).kind in LAYOUTS
        }
        return cls(checkpoint, quantised) if quantised else None

    @torch.no_grad()
    def settle(self) -> float:
        """Round every sum of weight and update, and let the frozen weights carry the difference.

        Returns:
            The root mean square of what rounding added, relative to that of the updates.
        """
        noise = signal = 0.0
        for name, module in self._layers.items():
            update = module.get_delta_weight("default").float().cpu().numpy()
            stored = self._checkpoint.tensor(name)
            carried = requantise(stored, update, ROUNDING).to_float32() - update
            noise += float(np.square(carried - stored.to_float32()).sum())
            signal += float(np.square(update).sum())
            module.get_base_layer().weight.copy_(torch.from_numpy(carried))
        return (noise / signal) ** 0.5 if signal else 0.0
