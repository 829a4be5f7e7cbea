"""Formats of packed weights: which bits of a matrix lie where.

A matrix [n, k] is cut into panels of 32 output features (n is padded with zero rows), and a panel
into blocks of 32 or 256 inputs. Panels, and the blocks in them, are consecutive, so a kernel reads
one stream of bytes. A block of quantised weights is

    32 scales (float16), then 32 minima (float16) where the format has minima;
    for each group of 32 inputs:
        where blocks are of 256: one or two times 32 integer scales (int8), of the group or of
        its halves, then 32 integer minima (int8) where the format has minima;
        1024 quants in planes.

A quant's bits are divided among planes, low bits first: 6 bits are a plane of 4 and one of 2. A
plane is a sequence of vectors of 64 bytes, and byte 4 * j + i of a vector belongs to output j (or
j + 16) and input i of four consecutive inputs. Such fours have two vectors each, for outputs 0-15
and 16-31, and a group has 16 of them. In a plane of b bits, 8 / b consecutive ones share the
bytes of one, the first in the lowest bits.

A weight is (quant - zero) * scale + minimum; where blocks are of 256, the block's scale times the
integer scale, and the block's minimum times the integer minimum. Products with integers of so few
bits are exact in float32, so the weight is rounded once.

MXFP4 has in the place of float16 scales 32 bytes: exponents e, of scales 2 ** (e - 128). Its 4 bits
are looked up in a table of quants. Only experts have it (experts/mxfp4.py).

These are the numbers that GGML's blocks of the same names hold, so a GGUF file is repacked without
loss, and with little or no growth. F32 blocks are 32 float32 per input.
"""

from dataclasses import dataclass
from enum import IntEnum

PANEL = 32
GROUP = 32
_HEADER_BYTES = 2 * PANEL


class WeightFormat(IntEnum):
    """How a panel stores its weights, named as GGML's types; but for MXFP4, by precision."""

    Q3_K = 0
    Q4_0 = 1
    Q4_1 = 2
    Q4_K = 3
    Q5_0 = 4
    Q5_1 = 5
    Q5_K = 6
    Q6_K = 7
    Q8_0 = 8
    F32 = 9
    MXFP4 = 10


@dataclass(frozen=True)
class BlockLayout:
    """What the blocks of a quantised format hold.

    Attributes:
        planes: bits of each plane, low ones first.
        groups: groups of 32 inputs per block: 1, or 8.
        scales: integer scales per group; 0 where a block has one group.
        has_minima: whether weights have a minimum.
        zero: the quant of weight 0, where they don't; a power of 2.
        lookup: the quant that each number in the planes stands for; empty where it is that number.
        has_exponents: whether scales are exponents of 8 bits.
    """

    planes: tuple[int, ...]
    groups: int = 1
    scales: int = 0
    has_minima: bool = False
    zero: int = 0
    lookup: tuple[int, ...] = ()
    has_exponents: bool = False

    @property
    def bits(self) -> int:
        """Bits per weight in the planes."""
        return sum(self.planes)

    @property
    def quant_bits(self) -> int:
        """Bits of the largest quant."""
        return max(self.lookup).bit_length() if self.lookup else self.bits

    @property
    def header_bytes(self) -> int:
        """Bytes of a block before its first group."""
        if self.has_exponents:
            return PANEL
        return _HEADER_BYTES * (2 if self.has_minima else 1)

    @property
    def integer_bytes(self) -> int:
        """Bytes of a group's integer scales and minima."""
        return PANEL * (self.scales + self.has_minima) if self.scales else 0

    @property
    def group_bytes(self) -> int:
        """Bytes of a group."""
        return self.integer_bytes + GROUP * PANEL * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.header_bytes + self.groups * self.group_bytes

    @property
    def scaled_inputs(self) -> int:
        """Inputs that share a scale."""
        return GROUP // max(1, self.scales)


LAYOUTS = {
    WeightFormat.Q3_K: BlockLayout((2, 1), groups=8, scales=2, zero=4),
    WeightFormat.Q4_0: BlockLayout((4,), zero=8),
    WeightFormat.Q4_1: BlockLayout((4,), has_minima=True),
    WeightFormat.Q4_K: BlockLayout((4,), groups=8, scales=1, has_minima=True),
    WeightFormat.Q5_0: BlockLayout((4, 1), zero=16),
    WeightFormat.Q5_1: BlockLayout((4, 1), has_minima=True),
    WeightFormat.Q5_K: BlockLayout((4, 1), groups=8, scales=1, has_minima=True),
    WeightFormat.Q6_K: BlockLayout((4, 2), groups=8, scales=2, zero=32),
    WeightFormat.Q8_0: BlockLayout((8,), zero=128),
}
"""Layouts of the formats that any matrix can have, but for F32."""

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the numbers of one sign that two bits of exponent and one of fraction stand for."""
_E2M1_ZERO = 16

EXPERT_LAYOUTS = {
    WeightFormat.MXFP4: BlockLayout(
        (4,),
        zero=_E2M1_ZERO,
        lookup=tuple(_E2M1_ZERO + sign * value for sign in (1, -1) for value in _E2M1),
        has_exponents=True,
    )
}
"""Layouts of formats that only experts have: Open Compute Project, "OCP Microscaling Formats (MX)
Specification", version 1.0, 2023, section 5.3.3."""


def layout_of(weight_format: WeightFormat) -> BlockLayout:
    """Return the layout of a format other than F32."""
    if weight_format in LAYOUTS:
        return LAYOUTS[weight_format]
    return EXPERT_LAYOUTS[weight_format]


def block_inputs(weight_format: WeightFormat) -> int:
    """Return the inputs of a block: 32 or 256."""
    return GROUP * (1 if weight_format is WeightFormat.F32 else layout_of(weight_format).groups)


def block_bytes(weight_format: WeightFormat) -> int:
    """Return the bytes of a block of 32 outputs."""
    if weight_format is WeightFormat.F32:
        return GROUP * PANEL * 4
    return layout_of(weight_format).block_bytes


def panel_bytes(weight_format: WeightFormat, inputs: int) -> int:
    """Return the bytes of one panel with that many inputs."""
    return inputs // block_inputs(weight_format) * block_bytes(weight_format)


def panel_count(outputs: int) -> int:
    """Return the panels of a matrix with that many output features."""
    return -(-outputs // PANEL)
