"""KIVI: keys at few bits per channel, values at few bits per token, the most recent tokens exact.

Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024,
arXiv 2402.02750. A few channels of the keys are much larger than the others, the same ones in all
tokens, so a scale per channel suits keys; values have no such channels, and each token is used by
itself, so a scale per token suits them. For codes q of b bits, over the numbers X of a group:

    z = min X,  s = (max X - min X) / (2^b - 1),  q = round((x - z) / s),  x ~ q * s + z

A group of keys is one channel of ``group`` consecutive tokens; a group of values is 64 channels of
one token, or all of them where a head has fewer or another number. Whole groups of tokens leave the
window of exact tokens, which holds at least ``residual``.

Differences: the prompt is computed exactly and quantised at its end. Values leave the window
together with their keys, while the paper has each token's values leave when it is ``residual``
tokens old.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from midfill.arrays import Float32Array
from midfill.kv.quantized import QuantizedBlock
from midfill.kv.quantized_layout import BITS_PER_CODE
from midfill.methods.budget import require
from midfill.methods.evict.method import OneShot, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.quantize.quantizers import (
    quantize_channels,
    quantize_tokens,
    refuse_unsuitable,
)
from midfill.methods.served_model import ServedModel

NAME = "kivi"
_GROUP_CHANNELS = 64


@dataclass(frozen=True)
class Kivi(OneShot):
    """The method's hyper-parameters.

    Attributes:
        bits: per number of keys and values: 1, 2, 3, 4 or 8; the paper's 2 and 4.
        residual: how many of the last tokens stay exact, at least; the paper's 128.
        group: tokens whose keys have a scale and a zero per channel; the paper's 32.
    """

    bits: int = 2
    residual: int = 64
    group: int = 64

    def __post_init__(self) -> None:
        require(self.bits in BITS_PER_CODE, f"bits must be 1, 2, 3, 4 or 8, not {self.bits}")
        require(self.residual >= 0, f"residual must be 0 or more tokens, not {self.residual}")
        require(self.group >= 1, f"group must be at least 1 token, not {self.group}")

    def for_model(self, model: ServedModel) -> Self:
        """Return the method itself.

        Raises:
            InvalidRequestError: see ``refuse_unsuitable``.
        """
        refuse_unsuitable(NAME, model)
        return self

    @property
    def follows_eviction(self) -> bool:
        """Yes: groups of keys are any keys of a head."""
        return True

    @property
    def interval(self) -> int:
        """A group."""
        return self.group

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``: whole groups of the oldest exact keys leave."""
        leaving = np.maximum(keys.counts - self.residual, 0) // self.group * self.group
        if not leaving.any():
            return None
        kept, blocks = [], []
        for head, (count, first) in enumerate(zip(keys.counts, leaving, strict=True)):
            oldest, rest = np.split(np.arange(count, dtype=np.int32), [first])
            kept.append(rest)
            blocks.append(self._blocks(*keys.read(head, oldest)))
        return Selection.of_heads(kept, quantized=blocks)

    def _blocks(self, keys: Float32Array, values: Float32Array) -> list[QuantizedBlock]:
        """Return the blocks of the groups of one head's [n, head_dim] keys and values."""
        shape = (-1, self.group, keys.shape[1])
        return self.encode(keys.reshape(shape), values.reshape(shape))

    def encode(self, keys: Float32Array, values: Float32Array) -> list[QuantizedBlock]:
        """Return the blocks of m groups of tokens: float32 [m, group, head_dim] keys and values."""
        return QuantizedBlock.of_several(
            quantize_channels(keys, self.bits),
            quantize_tokens(values, self.bits, self.value_groups(values.shape[-1])),
        )

    def value_groups(self, head_dim: int) -> int:
        """Return in how many groups of channels values are quantised."""
        return 1 if head_dim % _GROUP_CHANNELS else head_dim // _GROUP_CHANNELS
