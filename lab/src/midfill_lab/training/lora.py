"""Trainable parameters: LoRA updates and the sentinels' embedding rows, or all weights.

LoRA layers compute with merged weights: one matrix product where PEFT's layer needs three. PEFT
computes x W' + scale (x A') B' with intermediate results of the layer's size. Here the merged
weight W + scale B A is kept beside the layer and renewed after every optimizer step, and the
forward pass is that of a plain linear layer. The gradients of A and B follow from those of the
merged weight, dy' x, without it ever being formed:

    dA = scale (dy B)' x        dB = scale dy' (x A')

Updates over a quantised base are trained quantization-aware. Serving merges them by requantising
the sum (see ``models.checkpoints.quantized_update``), which adds rounding error that training in
floats never sees. In the last part of a run, the frozen weights W are therefore replaced by
Q(W + update) - update, where Q rounds as serving does. The forward pass then computes with
Q(W + update), the weights that are served, and the update learns to compensate the error. Q has no
useful gradient. It is passed over by the straight-through estimator (Bengio et al., 2013): the
error is a constant of the frozen weights. Q dithers every weight with a fixed number, so a small
change of the update changes few codes, and the error stays nearly the same between two
requantisations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.lora_merge import BLOCK_LAYOUTS, add_to_quantized
from midfill.models.checkpoints.lora_update import Rounding
from midfill.models.families import huggingface_names
from midfill_lab.training.recipe import TrainingRecipe

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA_MODULES = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj", "c_fc", "c_proj")


def make_trainable(model: Any, recipe: TrainingRecipe, sentinel_ids: Sequence[int]) -> Any:
    """Return the model with gradients required for exactly what the recipe trains, in float32.

    Args:
        model: a transformers causal model; it is modified.
        recipe: method, rank and alpha.
        sentinel_ids: tokens whose embedding rows are trained in addition to LoRA's updates.

    Returns:
        The model itself for full training, PEFT's wrapper around it for LoRA.
    """
    if recipe.gradient_checkpointing:
        # Older releases of transformers have only the second name.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.enable_input_require_grads()
    if recipe.method == "full":
        model.requires_grad_(True)
        return model
    from peft import LoraConfig, get_peft_model

    leaves = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    chosen = ATTENTION_MODULES if recipe.lora_modules == "attention" else LORA_MODULES
    torch.manual_seed(recipe.seed)
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            target_modules=sorted(leaves.intersection(chosen)),
            trainable_token_indices=sorted(sentinel_ids),
            task_type="CAUSAL_LM",
        ),
    )
    for each in wrapped.parameters():
        if each.requires_grad:
            each.data = each.data.float()
    return wrapped


class MergedLora:
    """The LoRA layers of a model, made to compute with merged weights.

    Args:
        model: PEFT's wrapper of a model; the forward pass of its linear layers is replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        lora: list[Any] = [each for each in model.modules() if hasattr(each, "lora_A")]
        self._layers = [
            _MergedLayer(each) for each in lora if isinstance(each.get_base_layer(), nn.Linear)
        ]
        for layer in self._layers:
            layer.install()

    @torch.no_grad()
    def merge(self) -> None:
        """Renew the merged weights: after every change of the updates or the frozen weights."""
        for layer in self._layers:
            layer.merge()


class _MergedLayer:
    """One of PEFT's LoRA layers and its merged weight."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._base: nn.Linear = module.get_base_layer()
        self._down: nn.Parameter = module.lora_A["default"].weight
        self._up: nn.Parameter = module.lora_B["default"].weight
        self._scale = float(module.scaling["default"])
        self._merged = torch.empty_like(self._base.weight)
        self.merge()

    def install(self) -> None:
        """Make PEFT's layer compute with the merged weight."""
        self._module.forward = self._forward

    @torch.no_grad()
    def merge(self) -> None:
        """Renew the merged weight."""
        update = self._up.float() @ self._down.float()
        torch.add(self._base.weight.float(), update, alpha=self._scale, out=update)
        self._merged.copy_(update)

    def _forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self._module.disable_adapters or self._module.merged:
            unchanged: torch.Tensor = self._base(x)
            return unchanged
        result: torch.Tensor = _MergedLinear.apply(  # type: ignore[no-untyped-call]  # by torch
            x, self._merged, self._down, self._up, self._scale
        )
        return result if self._base.bias is None else result + self._base.bias


class _MergedLinear(torch.autograd.Function):
    """x merged', with the gradients of LoRA's two factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        merged: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Compute [..., in] -> [..., out], in the merged weight's dtype."""
        x = x.to(merged.dtype)
        ctx.save_for_backward(x, merged, down, up)
        ctx.scale = scale
        return linear(x, merged)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, down and up."""
        x, merged, down, up = ctx.saved_tensors
        gradient = gradients[0].to(merged.dtype)
        rows, outputs = x.flatten(0, -2), gradient.flatten(0, -2)
        through_up = outputs @ up.to(merged.dtype)
        through_down = rows @ down.to(merged.dtype).T
        return (
            gradient @ merged if ctx.needs_input_grad[0] else None,
            None,
            (through_up.T @ rows).float() * ctx.scale,
            (outputs.T @ through_down).float() * ctx.scale,
            None,
        )


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
