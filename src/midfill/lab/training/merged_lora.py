"""LoRA layers computed with merged weights: one matrix product where PEFT's layer needs three.

PEFT computes x W' + scale (x A') B' with intermediate results of the layer's size. Here the merged
weight W + scale B A is kept beside the layer and renewed after every optimizer step, and the
forward pass is that of a plain linear layer. The gradients of A and B follow from those of the
merged weight, dy' x, without it ever being formed:

    dA = scale (dy B)' x        dB = scale dy' (x A')
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear


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
        result: torch.Tensor = _MergedLinear.apply(  # type: ignore[no-untyped-call]
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
