"""Quantised blocks: keys and values of a head's tokens at few bits each, in cells of the pool.

A block is a string of bytes that fills whole cells: first the K parts of all of them, then their V
parts, so that its bytes follow one another where its cells do. So there is one pool with one
accounting, whatever precisions it holds side by side, and a block is moved, freed and preempted
like other cells. It consists of two *streams*, keys and values, each of which stands for vectors

    x[t, c] = (code[t, c] * scale[t, g] + zero[t, g]) * channel_scale[c] + channel_zero[c]
              + sum over j of coefficient[t, j] * basis[j, c],    g = c // (head_dim / groups)

and *outliers*, which are added to few of the numbers. Every term but the codes may be missing.
``parts/quantized.py`` of the CPU kernels decodes the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midfill.arrays import Float32Array, Int32Array
from midfill.kv.quantized_layout import (
    BITS_PER_CODE,
    BLOCK_FIELDS,
    CELLS,
    CELLS_AT,
    CHANNEL_SCALE,
    CHANNEL_ZERO,
    MAX_OUTLIER_PLACES,
    MAX_RANK,
    STREAM_FIELDS,
    STREAMS,
    TOKENS,
)

UInt8Array = NDArray[np.uint8]
UInt16Array = NDArray[np.uint16]
Float16Array = NDArray[np.float16]


def bit_planes(bits: int) -> tuple[int, ...]:
    """Return the widths of the planes that codes are stored in, the lowest bits first.

    Three bits don't divide a byte: two of each code are stored in one plane, one in another.
    """
    return (2, 1) if bits == 3 else (bits,)


@dataclass(frozen=True)
class QuantizedVectors:
    """n vectors at few bits each; see above.

    Those of m blocks of n tokens each may be held together: every field then has a first axis of m.

    Attributes:
        codes: uint8 [n, head_dim], 0 <= code < 2^bits.
        bits: 1, 2, 3, 4 or 8.
        token_terms: float16 [n, groups, 2], scales and zeros; None if all are 1 and 0.
        channel_scale: float16 [head_dim]; None if all are 1.
        channel_zero: float16 [head_dim]; None if all are 0.
        coefficients: float16 [n, rank]; None if the rank is 0.
        basis: float16 [rank, head_dim]; None if the rank is 0.
        outlier_places: uint16 [m], token * head_dim + channel, ascending; None if there are none.
        outliers: float16 [m], what is added there; None if there are none.
    """

    codes: UInt8Array
    bits: int
    token_terms: Float16Array | None = None
    channel_scale: Float16Array | None = None
    channel_zero: Float16Array | None = None
    coefficients: Float16Array | None = None
    basis: Float16Array | None = None
    outlier_places: UInt16Array | None = None
    outliers: Float16Array | None = None

    def __len__(self) -> int:
        return int(self.codes.shape[-2])

    def decode(self) -> Float32Array:
        """Return what they stand for: float32 [n, head_dim]; [m, n, head_dim] without outliers."""
        vectors = self.codes.astype(np.float32)
        if self.token_terms is not None:
            terms = self.token_terms.astype(np.float32)
            grouped = vectors.reshape(*terms.shape[:-1], -1)
            vectors = (grouped * terms[..., :1] + terms[..., 1:]).reshape(self.codes.shape)
        if self.channel_scale is not None:
            vectors *= self.channel_scale.astype(np.float32)[..., None, :]
        if self.channel_zero is not None:
            vectors += self.channel_zero.astype(np.float32)[..., None, :]
        if self.coefficients is not None and self.basis is not None:
            vectors += self.coefficients.astype(np.float32) @ self.basis.astype(np.float32)
        if self.outlier_places is not None and self.outliers is not None:
            vectors.reshape(-1)[self.outlier_places] += self.outliers
        return vectors

    def fields(self, bytes_at: int) -> tuple[int, ...]:
        """Return the fields of a stream that begins at a byte of its block."""
        terms = self.token_terms
        channels = CHANNEL_SCALE * (self.channel_scale is not None)
        channels += CHANNEL_ZERO * (self.channel_zero is not None)
        groups = 0 if terms is None else terms.shape[-2]
        rank = 0 if self.basis is None else self.basis.shape[-2]
        outliers = 0 if self.outliers is None else self.outliers.shape[-1]
        return bytes_at, self.bits, groups, channels, rank, outliers

    def of_block(self, number: int) -> "QuantizedVectors":
        """Return the vectors of one of m blocks."""
        fields = {
            name: array[number]
            for name, array in vars(self).items()
            if name != "bits" and array is not None
        }
        return replace(self, **fields)

    def pack(self) -> UInt8Array:
        """Return the bytes of a stream, or of m: terms of channels, of tokens, codes, outliers.

        Raises:
            ValueError: codes have another width than there is, the rank is above 16, or there are
                too many places for outliers.
        """
        if self.bits not in BITS_PER_CODE:
            raise ValueError(f"codes of {self.bits} bits; there are {BITS_PER_CODE}")
        if self.basis is not None and self.basis.shape[-2] > MAX_RANK:
            raise ValueError(f"a rank of {self.basis.shape[-2]}; the highest is {MAX_RANK}")
        *blocks, count, dim = self.codes.shape
        if self.outliers is not None and count * dim > MAX_OUTLIER_PLACES:
            raise ValueError("blocks with outliers have at most 65,536 numbers")
        before = (
            self.channel_scale,
            self.channel_zero,
            self.basis,
            self.token_terms,
            # Side by side for what they are multiplied with: a segment's scores and weights.
            None if self.coefficients is None else self.coefficients.swapaxes(-1, -2),
        )
        sections = [_as_bytes(section, blocks) for section in before if section is not None]
        shift = 0
        for width in bit_planes(self.bits):
            plane = self.codes >> np.uint8(shift) if shift else self.codes
            sections.append(pack_codes(plane, width).reshape(*blocks, -1))
            shift += width
        after = (self.outlier_places, self.outliers)
        sections += [_as_bytes(section, blocks) for section in after if section is not None]
        return np.concatenate(sections, axis=-1)


def unpack_stream(
    data: UInt8Array, fields: Sequence[int], tokens: int, head_dim: int
) -> QuantizedVectors:
    """Return the vectors of a stream; the inverse of ``QuantizedVectors.pack``.

    Args:
        data: uint8, a block's bytes.
        fields: of the stream.
        tokens: of the block.
        head_dim: elements of a vector.
    """
    at, bits, groups, channels, rank, outliers = (int(field) for field in fields)

    def section(shape: tuple[int, ...], dtype: Any) -> Any:
        nonlocal at
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        at += size
        return data[at - size : at].copy().view(dtype).reshape(shape) if size else None

    half = np.float16
    scale = section((head_dim if channels & CHANNEL_SCALE else 0,), half)
    zero = section((head_dim if channels & CHANNEL_ZERO else 0,), half)
    basis = section((rank, head_dim), half)
    terms = section((tokens, groups, 2), half)
    by_rank = section((rank, tokens), half)
    coefficients = None if by_rank is None else by_rank.T
    codes, shift = np.zeros((tokens, head_dim), np.uint8), 0
    for width in bit_planes(bits):
        size = tokens * head_dim * width // 8
        codes |= unpack_codes(data[at : at + size], width).reshape(tokens, head_dim) << shift
        at, shift = at + size, shift + width
    places, values = section((outliers,), np.uint16), section((outliers,), half)
    return QuantizedVectors(codes, bits, terms, scale, zero, coefficients, basis, places, values)


def pack_codes(codes: UInt8Array, width: int) -> UInt8Array:
    """Return the lowest bits of codes, packed.

    16 codes are 2 * width bytes, of which byte i has code i in its lowest bits, then code
    i + 2 * width, and so on: 4 bits lie as in a KV cache of 4 bits, fewer widen to that with a
    shift and a mask.

    Args:
        codes: uint8 [..., n]; ``codes.size`` is a multiple of 16 (or any, of 8 bits).
        width: bits of each: 1, 2, 4 or 8.

    Returns:
        uint8 [codes.size * width / 8].
    """
    if width == 8:
        return codes.reshape(-1).copy()
    # The bytes that 16 codes become are shifted as one number: what is masked stays in its byte.
    word = np.dtype(f"u{2 * width}")
    grouped = np.ascontiguousarray(codes).reshape(-1).view(word).reshape(-1, 8 // width)
    mask = np.frombuffer(bytes([(1 << width) - 1]) * word.itemsize, word)
    packed = grouped[:, 0] & mask
    for place in range(1, 8 // width):
        packed |= (grouped[:, place] & mask) << word.type(place * width)
    as_bytes: UInt8Array = packed.view(np.uint8)
    return as_bytes


def unpack_codes(packed: UInt8Array, width: int) -> UInt8Array:
    """Return what ``pack_codes`` packed: uint8 [n]."""
    codes = np.empty(packed.size * 8 // width, np.uint8)
    for place, part in enumerate(_in_bytes(codes, width)):
        part[:] = (packed.reshape(part.shape) >> np.uint8(place * width)) & np.uint8(
            (1 << width) - 1
        )
    return codes


def _in_bytes(codes: UInt8Array, width: int) -> UInt8Array:
    """Return a view of codes [n]: those that are first in their byte, second, and so on."""
    if width == 8:
        return codes.reshape(1, -1)
    view: UInt8Array = codes.reshape(-1, 8 // width, 2 * width).transpose(1, 0, 2)
    return view


@dataclass(frozen=True)
class QuantizedBlock:
    """Keys and values of some tokens of one head, as bytes.

    Attributes:
        data: uint8 [n].
        tokens: how many they are of.
        fields: of both streams, 2 * STREAM_FIELDS.
    """

    data: UInt8Array
    tokens: int
    fields: tuple[int, ...]

    @classmethod
    def of(cls, keys: QuantizedVectors, values: QuantizedVectors) -> "QuantizedBlock":
        """Return the block of as many keys as values, at least one."""
        streams = keys.pack(), values.pack()
        fields = keys.fields(0) + values.fields(len(streams[0]))
        return cls(np.concatenate(streams), len(keys), fields)

    @classmethod
    def of_several(cls, keys: QuantizedVectors, values: QuantizedVectors) -> "list[QuantizedBlock]":
        """Return the blocks whose keys and values are held together."""
        streams = keys.pack(), values.pack()
        fields = keys.fields(0) + values.fields(streams[0].shape[1])
        return [cls(data, len(keys), fields) for data in np.concatenate(streams, axis=1)]

    def cells(self, cell_bytes: int) -> int:
        """Return how many cells it fills.

        Args:
            cell_bytes: of a cell's K and V together.
        """
        return -(-len(self.data) // cell_bytes)

    def decode(self, head_dim: int) -> tuple[Float32Array, Float32Array]:
        """Return the keys and values that it stands for: float32 [tokens, head_dim]."""
        return self.decode_keys(head_dim), self._decode(self.fields[STREAM_FIELDS:], head_dim)

    def decode_keys(self, head_dim: int) -> Float32Array:
        """Return the keys alone: float32 [tokens, head_dim]."""
        return self._decode(self.fields[:STREAM_FIELDS], head_dim)

    def _decode(self, stream: tuple[int, ...], head_dim: int) -> Float32Array:
        return unpack_stream(self.data, stream, self.tokens, head_dim).decode()


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """The blocks that a sequence attends to, head by head: ``table[indptr[i]:indptr[i + 1]]``.

    Every row of the sequence sees all of their keys. Blocks are compared by identity.

    Attributes:
        table: int32 [blocks, BLOCK_FIELDS].
        indptr: int32 [layers * kv_heads + 1].
        cells: int32 [n], what the blocks fill, one after the other.
    """

    table: Int32Array
    indptr: Int32Array
    cells: Int32Array

    @classmethod
    def of_heads(
        cls, heads: Sequence[Sequence[QuantizedBlock]], cells: Int32Array, cell_bytes: int
    ) -> "QuantizedBlocks":
        """Return the blocks of each head, which fill ``cells`` in this order."""
        rows, at = [], 0
        for blocks in heads:
            for block in blocks:
                filled = block.cells(cell_bytes)
                rows.append((block.tokens, at, filled, *block.fields))
                at += filled
        table = np.array(rows, np.int32).reshape(-1, BLOCK_FIELDS)
        indptr = np.cumsum([0, *map(len, heads)]).astype(np.int32)
        return cls(table, indptr, cells)

    @property
    def counts(self) -> Int32Array:
        """Keys of each head: [layers * kv_heads] int32."""
        sums = np.concatenate(([0], np.cumsum(self.table[:, TOKENS])))
        return np.diff(sums[self.indptr]).astype(np.int32)

    @property
    def nbytes(self) -> int:
        """Memory of the lists, without the cells."""
        return self.table.nbytes + self.indptr.nbytes + self.cells.nbytes

    def numbers(self, head: int) -> range:
        """Return the numbers of a head's blocks."""
        return range(int(self.indptr[head]), int(self.indptr[head + 1]))

    def cells_of(self, number: int) -> Int32Array:
        """Return the cells of a block."""
        start, count = self.table[number, CELLS_AT], self.table[number, CELLS]
        return self.cells[start : start + count]

    def block(self, number: int, data: UInt8Array) -> QuantizedBlock:
        """Return a block, given the bytes of its cells."""
        row = self.table[number].tolist()
        return QuantizedBlock(data, row[TOKENS], tuple(row[STREAMS:]))

    def joined(self, later: "QuantizedBlocks") -> "QuantizedBlocks":
        """Return each head's blocks followed by those that it has in ``later``."""
        moved = later.table.copy()
        moved[:, CELLS_AT] += len(self.cells)
        heads = range(len(self.indptr) - 1)
        order = [
            rows[blocks.numbers(head)]
            for head in heads
            for rows, blocks in ((self.table, self), (moved, later))
        ]
        table = np.concatenate(order)
        cells = np.concatenate((self.cells, later.cells))
        return QuantizedBlocks(table, self.indptr + later.indptr, cells)


def cell_data(keys: UInt8Array, values: UInt8Array) -> UInt8Array:
    """Return the bytes of a block, given those of its cells' K and V: [n, bytes] each."""
    return np.concatenate((keys, values)).reshape(-1)


def cell_arrays(blocks: Sequence[QuantizedBlock], cell_bytes: int) -> tuple[UInt8Array, ...]:
    """Return what the K and V of the cells hold that blocks fill: uint8 [n, cell_bytes / 2] each.

    Args:
        blocks: one after the other.
        cell_bytes: of a cell's K and V together.
    """
    filled = [np.zeros((2, block.cells(cell_bytes), cell_bytes // 2), np.uint8) for block in blocks]
    for cells, block in zip(filled, blocks, strict=True):
        cells.reshape(-1)[: len(block.data)] = block.data
    every = np.concatenate(filled, axis=1)
    return every[0], every[1]


def _as_bytes(array: NDArray[np.generic], blocks: Sequence[int]) -> UInt8Array:
    """Return the bytes of one block's array, or of those of some blocks."""
    return np.ascontiguousarray(array).reshape(*blocks, -1).view(np.uint8)
