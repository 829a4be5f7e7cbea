"""CacheGen: KV as quantised symbols, entropy-coded under the model's own statistics.

Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving",
SIGCOMM 2024, arXiv 2310.07240; the form of the authors' code (UChi-JCL/CacheGen), in which symbols
are values and not differences to an anchor token. Each token's keys (and values) of a layer have
one scale, their largest magnitude; a value becomes the nearest of B steps between minus and plus
that.
Shallow layers have more steps than deep ones, since answers depend more on them. Values of one
channel are distributed alike, so symbols are coded with a table per layer and channel, which comes
from a profile of the model (``cachegen_profile``) and is not stored with the KV.

It differs in the coder: one range code per layer (``kernels.cpu.entropy.rans``) instead of one
arithmetic code per channel, whose ends and lengths would be a third of a small model's bytes.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midfill.arrays import Float32Array
from midfill.kernels.cpu.entropy.rans import (
    TOTAL,
    code_bound,
    decode_symbols,
    encode_symbols,
)
from midfill.kv.blob import BlobError
from midfill.methods.budget import require

UInt8Array = NDArray[np.uint8]
UInt16Array = NDArray[np.uint16]

MAX_BINS = 256
_DTYPES: dict[str, Any] = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}
_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": np.inf}
_SHALLOW_KEYS, _SHALLOW_VALUES = 1 / 3, 1 / 16  # of the layers; 10 and 2 of 32 in the authors' code


@dataclass(frozen=True)
class CacheGen:
    """Hyper-parameters. Those of the authors' code, for a model of 7B, are 32 and 16.

    Attributes:
        shallow: number of steps in the first layers.
        deep: number of steps in the others.
    """

    shallow: int = 64
    deep: int = 32

    def __post_init__(self) -> None:
        for name in ("shallow", "deep"):
            require(
                4 <= getattr(self, name) <= MAX_BINS,
                f"cachegen: {name} must be from 4 to {MAX_BINS}, not {getattr(self, name)}",
            )

    @property
    def bins(self) -> int:
        """The largest number of steps: tables have room for so many."""
        return max(self.shallow, self.deep)

    def layer_bins(self, layers: int) -> NDArray[np.int64]:
        """Return the number of steps of keys and values in each layer: [2, layers]."""
        bins = np.full((2, layers), self.deep)
        for array, share in enumerate((_SHALLOW_KEYS, _SHALLOW_VALUES)):
            bins[array, : max(round(layers * share), 1)] = self.shallow
        return bins


@dataclass(frozen=True)
class KvShape:
    """How a runner stores KV.

    Attributes:
        dtype: "f16", "bf16" or "f32".
        layers, kv_heads, head_dim: of the model.
    """

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        require(self.dtype in _DTYPES, f"cachegen codes KV in f16, bf16 or f32, not {self.dtype}")

    @property
    def channels(self) -> int:
        """Numbers of a token's keys in a layer."""
        return self.kv_heads * self.head_dim

    def read(self, data: bytes, tokens: int) -> Float32Array:
        """Return raw KV as float32 [2, layers, kv_heads, tokens, head_dim]."""
        stored = np.frombuffer(data, _DTYPES[self.dtype])
        shape = (2, self.layers, self.kv_heads, tokens, self.head_dim)
        if self.dtype == "bf16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        numbers: Float32Array = stored.reshape(shape).astype(np.float32)
        return numbers

    def write(self, numbers: Float32Array) -> bytes:
        """Return the raw KV that ``read`` reads."""
        limit = _LARGEST[self.dtype]
        numbers = np.clip(numbers, -limit, limit)
        if self.dtype == "bf16":
            bits = np.ascontiguousarray(numbers).view(np.uint32)
            return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16).tobytes()
        return numbers.astype(_DTYPES[self.dtype]).tobytes()


def quantize(
    numbers: Float32Array, bins: NDArray[np.int64]
) -> tuple[UInt8Array, NDArray[np.float16]]:
    """Return symbols and scales.

    Args:
        numbers: float32 [2, layers, kv_heads, tokens, head_dim].
        bins: [2, layers].

    Returns:
        symbols: uint8 [2, layers, kv_heads, head_dim, tokens], so that a channel's lie together.
        scales: float16 [2, layers, tokens].

    Raises:
        ValueError: a number is not finite, or too large for the scale.
    """
    largest = np.abs(numbers).max(axis=(2, 4))
    with np.errstate(over="ignore"):  # refused below
        scales = largest.astype(np.float16)
    low = scales.astype(np.float32) < largest
    scales[low] = np.nextafter(scales[low], np.float16(np.inf))  # so that no number exceeds it
    if not np.isfinite(scales).all():
        raise ValueError("KV that is not finite, or above 65504, can't be coded")
    half = _half(bins)
    exact = scales.astype(np.float32)
    factor = np.divide(half[..., None], exact, out=np.zeros_like(exact), where=exact > 0)
    scaled = numbers * factor[:, :, None, :, None] + half[:, :, None, None, None]
    symbols = np.rint(scaled, out=scaled).astype(np.uint8)
    return np.ascontiguousarray(symbols.swapaxes(3, 4)), scales


def dequantize(
    symbols: UInt8Array, scales: NDArray[np.float16], bins: NDArray[np.int64]
) -> Float32Array:
    """Return float32 [2, layers, kv_heads, tokens, head_dim] near what ``quantize`` was given."""
    half = _half(bins)
    factor = scales.astype(np.float32) / half[..., None]
    numbers = symbols.swapaxes(3, 4).astype(np.float32)
    numbers -= half[:, :, None, None, None]
    numbers *= factor[:, :, None, :, None]
    return numbers


def cumulative_tables(counts: NDArray[np.int64], bins: NDArray[np.int64]) -> UInt16Array:
    """Return tables for the coder from how often each symbol was seen.

    Every symbol that can occur has at least one of TOTAL parts, seen or not.

    Args:
        counts: [2, layers, channels, n].
        bins: [2, layers], at most n.

    Returns:
        uint16 [2, layers, channels, n + 1].
    """
    possible = np.arange(counts.shape[-1]) < (2 * _half(bins).astype(np.int64) + 1)[..., None]
    possible = np.broadcast_to(possible[:, :, None], counts.shape)
    spare = TOTAL - possible.sum(axis=-1, keepdims=True)
    seen = np.where(possible, counts, 0)
    total = np.maximum(seen.sum(axis=-1, keepdims=True), 1)
    parts = seen * spare // total + possible
    most = parts.argmax(axis=-1)[..., None]
    rest = TOTAL - parts.sum(axis=-1, keepdims=True)
    np.put_along_axis(parts, most, np.take_along_axis(parts, most, -1) + rest, -1)
    sums = np.zeros((*counts.shape[:-1], counts.shape[-1] + 1), np.int64)
    sums[..., 1:] = parts.cumsum(axis=-1)
    return sums.astype(np.uint16)


def count_symbols(symbols: UInt8Array, bins: int) -> NDArray[np.int64]:
    """Return how often each symbol occurs in each channel: [2, layers, channels, bins]."""
    arrays, layers, tokens = symbols.shape[0], symbols.shape[1], symbols.shape[-1]
    rows = symbols.reshape(-1, tokens).astype(np.int64)
    rows += np.arange(len(rows))[:, None] * bins
    counted = np.bincount(rows.reshape(-1), minlength=bins * len(rows))
    return counted.reshape(arrays, layers, -1, bins)


class CacheGenCodec:
    """Codes chunks of one model; implements ``kv.tiers.warm_tier.ChunkCodec``.

    Args:
        method: hyper-parameters.
        shape: of the KV.
        tables: ``cumulative_tables`` of the model's profile.
    """

    def __init__(self, method: CacheGen, shape: KvShape, tables: UInt16Array) -> None:
        self._shape = shape
        self._bins = method.layer_bins(shape.layers)
        self._size = method.bins
        self._tables = np.ascontiguousarray(tables).reshape(2 * shape.layers, -1)
        digest = hashlib.sha256(self._tables.tobytes()).hexdigest()[:16]
        self._name = f"cachegen:shallow={method.shallow},deep={method.deep}:{digest}"

    @property
    def name(self) -> str:
        """See ``ChunkCodec``: the hyper-parameters and the profile's digest."""
        return self._name

    def encode(self, data: bytes, tokens: int) -> bytes:
        """See ``ChunkCodec.encode``: scales, lengths of the layers' codes, codes."""
        symbols, scales = quantize(self._shape.read(data, tokens), self._bins)
        streams = symbols.reshape(len(self._tables), -1)
        out = np.empty(code_bound(streams.shape[1]), np.uint8)
        codes = []
        for stream, table in zip(streams, self._tables, strict=True):
            start = encode_symbols(stream, tokens, table, self._size, out)
            codes.append(out[start:].tobytes())
        lengths = np.array([len(code) for code in codes], "<u4")
        return b"".join((scales.tobytes(), lengths.tobytes(), *codes))

    def decode(self, code: bytes | memoryview, tokens: int) -> bytes:
        """See ``ChunkCodec.decode``."""
        shape, count = self._shape, len(self._tables)
        scale_bytes = 2 * count * tokens
        start = scale_bytes + 4 * count
        if len(code) < start:
            raise BlobError("the code is cut off")
        scales = np.frombuffer(code[:scale_bytes], np.float16).reshape(2, shape.layers, tokens)
        lengths = np.frombuffer(code[scale_bytes:start], "<u4").astype(np.int64)
        if start + int(lengths.sum()) != len(code) or not np.isfinite(scales).all():
            raise BlobError("the code's lengths or scales make no sense")
        symbols = np.empty((count, shape.channels * tokens), np.uint8)
        stored = np.frombuffer(code, np.uint8)
        for stream, table, length in zip(symbols, self._tables, lengths.tolist(), strict=True):
            part = stored[start : start + length]
            if decode_symbols(part, tokens, table, self._size, stream) != length:
                raise BlobError("the code ends elsewhere than its symbols")
            start += length
        ordered = symbols.reshape(2, shape.layers, shape.kv_heads, shape.head_dim, tokens)
        return shape.write(dequantize(ordered, scales, self._bins))


def _half(bins: NDArray[np.int64]) -> Float32Array:
    """Return the number of steps on each side of 0."""
    return (bins // 2 - 1).astype(np.float32)
