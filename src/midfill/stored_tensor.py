"""StoredTensor: a tensor as a checkpoint's file stores it."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it is stored in the file, not yet dequantised.

    Attributes:
        name: canonical name.
        shape: logical shape, e.g. (out_features, in_features).
        kind: lower-case GGML type name: "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1",
            "q8_0", "q2_k" ... "q6_k", ...; or "f8_e4m3".
        data: "f32": float32 of ``shape``; "f16": float16; "bf16": uint16 bit patterns of
            ``shape``; "f8_e4m3": uint8 bit patterns of ``shape``; quantised kinds: uint8 [rows,
            bytes per row], rows = prod(shape[:-1]), each row a sequence of GGML blocks. May be a
            read-only memory map.
        exponents: of "mxfp4" as Hugging Face's files have it, uint8 [rows, blocks]: the blocks'
            exponents, while ``data`` is [rows, blocks, 16], two consecutive numbers to a byte, the
            first one in its low half. None where ``data`` has GGML's blocks.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: npt.NDArray[np.generic]
    exponents: npt.NDArray[np.uint8] | None = None

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Dequantise; return float32 of ``shape`` (the data itself where it is float32)."""
        if self.kind == "f32":
            return self.data.astype(np.float32, copy=False)
        if self.kind == "f16":
            return self.data.astype(np.float32)
        if self.kind == "bf16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if self.kind == "f8_e4m3":
            return np.take(_float8_values(), self.data.view(np.uint8))
        # Slow to import, and needed only while weights are packed.
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        data = self.data if self.exponents is None else mxfp4_blocks(self)
        values = dequantize(data, GGMLQuantizationType[self.kind.upper()])
        return np.asarray(values, np.float32).reshape(self.shape)


def mxfp4_blocks(tensor: StoredTensor) -> npt.NDArray[np.uint8]:
    """Return MXFP4 in GGML's blocks: uint8 [rows, blocks * 17].

    A block is its exponent, then 16 bytes, of which byte i has number i in its low half and number
    16 + i in its high one.
    """
    data = tensor.data.view(np.uint8)
    if tensor.exponents is None:
        return data
    exponents = tensor.exponents
    rows, blocks = exponents.shape
    codes = data.reshape(rows, blocks, 16)
    numbers = np.stack((codes & 15, codes >> 4), axis=-1).reshape(rows, blocks, 2, 16)
    packed = numbers[:, :, 0] | numbers[:, :, 1] << np.uint8(4)
    return np.concatenate((exponents[..., None], packed), axis=-1).reshape(rows, -1)


@cache
def _float8_values() -> npt.NDArray[np.float32]:
    """Return the value of each bit pattern of float8 E4M3, which has no infinity: float32 [256]."""
    exponents, fractions = np.arange(16)[:, None], np.arange(8) / np.float32(8)
    values = np.where(exponents == 0, fractions * 2.0**-6, (1 + fractions) * 2.0 ** (exponents - 7))
    values[15, 7] = np.nan
    return np.concatenate([values, -values]).reshape(-1).astype(np.float32)


def quantized(name: str, values: npt.NDArray[np.float32], kind: str) -> StoredTensor:
    """Return rows of floats [rows, values] rounded to the nearest quants of a GGML kind."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    blocks = quantize(values, GGMLQuantizationType[kind.upper()])
    return StoredTensor(name, values.shape, kind, blocks.reshape(len(values), -1))
