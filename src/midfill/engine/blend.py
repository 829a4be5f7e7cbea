"""Blend: the state of a prefill that takes KV from elsewhere, between steps."""

from dataclasses import dataclass, field

import torch

from midfill.arrays import Int64Array
from midfill.methods.reuse.method import LayerKV, ReuseMethod

MIN_SAVED_ROWS = 32
"""A prompt is blended if that saves the work of so many rows through all layers, or more."""


@dataclass
class Blend:
    """One sequence's; see ``engine.step.blending`` for the stages.

    Attributes:
        method: chooses what is computed again.
        end: number of the first token that is left to ordinary prefill.
        copied: [n] int64, numbers of the copied tokens.
        reference: their KV in the check layer, as it was copied.
        shallow: number of the next token to run through the first layers.
        hidden: hidden rows after the check layer, as they were computed; one tensor per call.
        rows: [n] int64, numbers of the tokens to run through the layers above; None before the
            method has chosen.
        deep: how many of them have run.
    """

    method: ReuseMethod
    end: int
    copied: Int64Array
    reference: LayerKV
    shallow: int
    hidden: list[torch.Tensor] = field(default_factory=list)
    rows: Int64Array | None = None
    deep: int = 0
