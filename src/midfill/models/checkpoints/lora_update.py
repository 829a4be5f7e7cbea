"""What an adapter changes of its base's weights, and the rules by which that is rounded.

Nothing here is compiled: a server reads adapters only for what they say of prompts, and the engine
merges them (``lora_merge``).
"""

from dataclasses import dataclass
from typing import Literal

from midfill.arrays import Float32Array

Rounding = Literal["nearest", "diffusion", "stochastic"]
"""How a sum of weight and update is rounded to a quant.

nearest: each group of 32 gets a new grid from its smallest and largest sum, and each sum the
    nearest quant on it.
diffusion: the groups keep their grids. The error that rounding (and clamping to the grid's ends)
    makes in one weight of a row is carried to the next one, so that sums over stretches of a row's
    update are exact to about a grid step. This is error diffusion (Floyd and Steinberg, 1976) in
    one dimension. Each row rounds at its own threshold, a hash of its number. Otherwise updates
    too small to add up to half a step along a row would be lost in all rows alike.
stochastic: the groups keep their grids, and a sum is rounded up or down with the probability that
    makes the expected quant exact. The dither is a hash of the weight's place, so it is the same at
    every load.

The last two are exact on average, and they leave a weight unchanged if nothing is added to it.
"""

DEFAULT_ROUNDING: Rounding = "diffusion"
"""The rule that loses least of an update trained in floats."""

ROUNDING_VERSION = 1
"""Part of digests; increased whenever the same input would be rounded differently."""


@dataclass(frozen=True)
class LoraUpdate:
    """scale * up @ down.

    Attributes:
        down: float32 [rank, inputs], PEFT's lora_A.
        up: float32 [outputs, rank], lora_B.
        scale: lora_alpha / rank, or lora_alpha / sqrt(rank) with rsLoRA.
    """

    down: Float32Array
    up: Float32Array
    scale: float


@dataclass(frozen=True)
class ReplacedRows:
    """New rows for some tokens of an embedding or LM head.

    Attributes:
        token_ids: the rows' tokens, each once.
        values: float32 [len(token_ids), hidden].
    """

    token_ids: tuple[int, ...]
    values: Float32Array
