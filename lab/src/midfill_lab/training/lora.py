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
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.lora_merge import BLOCK_LAYOUTS, GROUP
from midfill.models.checkpoints.lora_update import Rounding
from midfill.models.families import huggingface_names
from midfill.stored_tensor import StoredTensor
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
        model: PEFT's wrapper of a model; its LoRA layers over linear ones become
            ``_merged_class``'s.
    """

    def __init__(self, model: nn.Module) -> None:
        lora: list[Any] = [each for each in model.modules() if hasattr(each, "lora_A")]
        self._layers = [each for each in lora if isinstance(each.get_base_layer(), nn.Linear)]
        for layer in self._layers:
            # Of the same layout: parameters keep their names, and compiled code sees a module.
            layer.__class__ = _merged_class()
            merged = torch.empty_like(layer.get_base_layer().weight)
            layer.register_buffer("merged_weight", merged, persistent=False)
        self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Renew the merged weights: after every change of the updates or the frozen weights."""
        for layer in self._layers:
            base = layer.get_base_layer().weight
            up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
            scale = layer.scaling["default"]
            layer.merged_weight.copy_(torch.addmm(base.float(), up, down, alpha=scale))


@cache
def _merged_class() -> type[nn.Module]:
    """Return PEFT's LoRA layer with a forward pass through ``merged_weight``: [out, in]."""
    from peft.tuners.lora import Linear

    class MergedLinear(Linear):
        def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            base: Any = self.get_base_layer()
            if self.disable_adapters or self.merged:
                unchanged: torch.Tensor = base(x)
                return unchanged
            result: torch.Tensor = _MergedLinear.apply(  # type: ignore[no-untyped-call]  # by torch
                x,
                self.merged_weight,
                self.lora_A["default"].weight,
                self.lora_B["default"].weight,
                self.scaling["default"],
            )
            return result if base.bias is None else result + base.bias

    return MergedLinear


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
        self._matrices: dict[str, _QuantisedMatrix] = {}

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
            weight = module.get_base_layer().weight
            if name not in self._matrices:
                stored = self._checkpoint.tensor(name)
                self._matrices[name] = _QuantisedMatrix.read(stored, weight.device)
            matrix = self._matrices[name]
            update = module.get_delta_weight("default").float()
            rounded = matrix.add(update)
            error += float((rounded - matrix.weights() - update).square().sum())
            signal += float(update.square().sum())
            weight.copy_(rounded.sub_(update))
        return (error / signal) ** 0.5 if signal else 0.0


@dataclass(frozen=True)
class _QuantisedMatrix:
    """A matrix of a base on the training device: weight = quant x scale + origin.

    Attributes:
        quants: uint8 [rows, groups, 32].
        scales, origins: float32 [rows, groups, 1].
        top: the largest quant.
    """

    quants: torch.Tensor
    scales: torch.Tensor
    origins: torch.Tensor
    top: int

    @classmethod
    def read(cls, stored: StoredTensor, device: torch.device) -> "_QuantisedMatrix":
        """Read a matrix of a kind in ``BLOCK_LAYOUTS``."""
        layout, rows = BLOCK_LAYOUTS[stored.kind], stored.shape[0]
        blocks = np.ascontiguousarray(stored.data).view(np.uint8).reshape(rows, -1, layout.size)
        header = blocks[..., :4].copy().view(np.float16).astype(np.float32)
        scales = header[..., :1]
        origins = header[..., 1:2] if layout.has_minimum else -layout.zero * scales
        weights = stored.to_float32().reshape(rows, -1, GROUP)
        steps = np.where(scales == 0, 1, scales)
        quants = np.rint((weights - origins) / steps).astype(np.uint8)
        arrays: tuple[Any, ...] = (quants, scales, origins)
        on_device = [torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in arrays]
        return cls(on_device[0], on_device[1], on_device[2], layout.top)

    def weights(self) -> torch.Tensor:
        """Return the base's weights: float32 [rows, inputs]."""
        return torch.addcmul(self.origins, self.quants.float(), self.scales).flatten(1)

    def add(self, update: torch.Tensor) -> torch.Tensor:
        """Return the sum with an update, rounded as serving does by ``QAT_ROUNDING``.

        Args:
            update: float32 [rows, inputs].

        Returns:
            float32 [rows, inputs].
        """
        inverse = torch.where(self.scales == 0, 0.0, 1.0 / self.scales)
        wanted = torch.addcmul(self.quants.float(), update.view(self.quants.shape), inverse)
        dither = _dither(update.shape[0], update.shape[1], update.device).view(self.quants.shape)
        quants = (wanted.clamp_(0, self.top) + dither).round_()
        return torch.addcmul(self.origins, quants, self.scales).flatten(1)


@cache
def _dither(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return the dither that ``models.checkpoints.lora_merge`` adds: float32 [rows, columns].

    It is the same for all matrices of a shape.
    """
    row = torch.arange(rows, device=device)[:, None] * 0x9E3779B1
    column = torch.arange(columns, device=device) * 0x85EBCA77 + 0x165667B1
    mixed = (row & _MASK) ^ (column & _MASK)
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK
    mixed ^= mixed >> 16
    return ((mixed >> 18).float() + 0.5) * 2**-14 - 0.5


_MASK = 0xFFFFFFFF  # products of 32-bit numbers are cut to 32 bits
