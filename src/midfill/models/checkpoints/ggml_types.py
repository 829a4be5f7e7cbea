"""The numbers of ggml's tensor types and of GGUF's values, as ggml.h and docs/gguf.md state them.

The ``gguf`` library has them, too. It takes 50 ms to import, which a start needs not spend: the
library is for what is dequantised or quantised when weights are packed.
"""

from dataclasses import dataclass

GGUF_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""NumPy's dtypes of a GGUF file's numbers, by value type."""

GGUF_STRING, GGUF_ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How a tensor's rows are stored: as blocks of some values in some bytes each.

    Attributes:
        kind: lower-case name, as in ``StoredTensor.kind``.
        block_values: values per block.
        block_bytes: bytes per block.
    """

    kind: str
    block_values: int
    block_bytes: int


GGML_TYPES = {
    0: GgmlType("f32", 1, 4),
    1: GgmlType("f16", 1, 2),
    2: GgmlType("q4_0", 32, 18),
    3: GgmlType("q4_1", 32, 20),
    6: GgmlType("q5_0", 32, 22),
    7: GgmlType("q5_1", 32, 24),
    8: GgmlType("q8_0", 32, 34),
    10: GgmlType("q2_k", 256, 84),
    11: GgmlType("q3_k", 256, 110),
    12: GgmlType("q4_k", 256, 144),
    13: GgmlType("q5_k", 256, 176),
    14: GgmlType("q6_k", 256, 210),
    16: GgmlType("iq2_xxs", 256, 66),
    17: GgmlType("iq2_xs", 256, 74),
    18: GgmlType("iq3_xxs", 256, 98),
    19: GgmlType("iq1_s", 256, 50),
    20: GgmlType("iq4_nl", 32, 18),
    21: GgmlType("iq3_s", 256, 110),
    22: GgmlType("iq2_s", 256, 82),
    23: GgmlType("iq4_xs", 256, 136),
    29: GgmlType("iq1_m", 256, 56),
    30: GgmlType("bf16", 1, 2),
    34: GgmlType("tq1_0", 256, 54),
    35: GgmlType("tq2_0", 256, 66),
    39: GgmlType("mxfp4", 32, 17),
    40: GgmlType("nvfp4", 64, 36),
}
"""Types that can be dequantised, by number: all that model files use."""
