"""GEAR: keys at few bits, and what that gets wrong in a low rank and in a few outliers.

Source: Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative
Inference of LLM", 2024, arXiv 2403.05527. A block X of a head's keys or values [n, head_dim] is
stored as D + L + S:

- S, outliers: what D + L lacks of the s/2 largest and the s/2 smallest numbers of each vector. A
  vector is a channel along the block's tokens for keys, a token's channels in all heads of the
  layer for values. D has the vector's mean in their places, which don't widen its range then.
- D, the backbone: codes of some bits, from the smallest to the largest number per channel for keys
  (KCVT over the block; a block of 64 tokens is KIVI's grouping), per token for values.
- L = A B, the residual X - D - S in rank r, found by three power iterations from random
  directions, the same for every block: B = qr(B), A = qr(R B), B = A^T R.

GEAR-L is without S (outliers=0). The newest tokens stay exact until they fill a buffer, which then
becomes a block. A number of a block costs, with 16 bits per place of an outlier, about

    bits + 16 / n + 16 / group + 16 r (n + head_dim) / (n head_dim) + 32 s

bits, on average over keys and values: the scale and zero of each, the low rank, the outliers. With
64 channels and blocks of 256 tokens that is 2.31 bits for D at 2 bits, 0.31 more per rank, and up
to 0.64 more for 2% outliers; with blocks of 64, KIVI's, it is 2.5 bits, and 0.5 per rank.

Differences:
- The published block spans the whole prompt. Here blocks have a fixed number of tokens.
- Values have a scale per token and head. The paper's KCVT has one per token.
- An answer's buffer fills up from the prompt's end on, beside what the prompt left in it, so that
  up to twice as many tokens are exact.
- The released code derives how many numbers of a key's channel are outliers from those of a token;
  here they are s n / 2 on each side, as the paper says, rounded.
"""

from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from midfill.arrays import BoolArray, Float32Array
from midfill.kv.quantized import QuantizedBlock, QuantizedVectors
from midfill.kv.quantized_layout import MAX_OUTLIER_PLACES, MAX_RANK
from midfill.methods.budget import require
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.quantize.quantizers import (
    quantize_channels,
    quantize_tokens,
    refuse_unsuitable,
)
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig

NAME = "gear"
_ITERATIONS = 3

_Number = TypeVar("_Number", np.float32, np.bool_)


@dataclass(frozen=True)
class Gear(MethodDefaults):
    """The method's hyper-parameters.

    Attributes:
        bits: per number of the backbone: 2, 3, 4 or 8; the paper's 4 with KCVT, 2 with KIVI's
            grouping.
        rank: of the prompt's residuals; the released 4. 0 leaves them out.
        later_rank: of those of the answer's blocks; the released 2.
        outliers: share of a block's numbers that are stored as they are; the released 0.02. 0 is
            GEAR-L.
        block: tokens of a prompt's block, the last of which may have fewer. 64 is KIVI's grouping.
        group: channels of a value that share a scale, at most all of a head's.
        buffer: how many of the newest tokens are collected exact before they become a block; the
            released 64 with KIVI's grouping, 20 with KCVT.
    """

    bits: int = 4
    rank: int = 4
    later_rank: int = 2
    outliers: float = 0.02
    block: int = 256
    group: int = 64
    buffer: int = 64

    def __post_init__(self) -> None:
        require(self.bits in (2, 3, 4, 8), f"bits must be 2, 3, 4 or 8, not {self.bits:g}")
        for name in ("rank", "later_rank"):
            rank = getattr(self, name)
            require(
                0 <= rank <= MAX_RANK and rank == int(rank),
                f"{name} must be from 0 to {MAX_RANK}, not {rank:g}",
            )
        require(
            0 <= self.outliers <= 1, f"outliers must be a share from 0 to 1, not {self.outliers:g}"
        )
        for name in ("block", "buffer"):
            tokens = getattr(self, name)
            require(
                tokens >= 1 and tokens == int(tokens),
                f"{name} must be a number of tokens, not {tokens:g}",
            )
        require(
            self.group >= 16 and self.group % 16 == 0,
            f"group must be a multiple of 16 channels, not {self.group:g}",
        )

    @property
    def interval(self) -> int:
        """A block's worth of the answer."""
        return self.buffer

    def for_model(self, model: ServedModel) -> Self:
        """Return the method itself.

        Raises:
            InvalidRequestError: see ``refuse_unsuitable``; or blocks have too many numbers.
        """
        refuse_unsuitable(NAME, model)
        most = MAX_OUTLIER_PLACES // model.config.head_dim
        require(
            not self.outliers or self.block <= most,
            f"blocks with outliers have at most {most} tokens in this model, not {self.block}:"
            f" say block={most} or outliers=0",
            NAME,
        )
        return self

    @property
    def follows_eviction(self) -> bool:
        """No: outliers are those of a token's values in all heads."""
        return False

    def start(self, config: ModelConfig) -> "BlockwiseCompression":
        """Return a compressor for a new sequence."""
        return BlockwiseCompression(self)

    def outliers_per_side(self, count: int) -> int:
        """Return how many of ``count`` numbers are outliers above the others, and how many below.

        That is to the nearest number, so that few numbers may have none.
        """
        return int(self.outliers * count / 2 + 0.5)

    def encode(self, keys: Float32Array, values: Float32Array, rank: int) -> list[QuantizedBlock]:
        """Return a layer's blocks of some tokens, one per head.

        Args:
            keys, values: float32 [kv_heads, n, head_dim].
            rank: of the residuals.
        """
        return [block for [block] in self.encode_blocks(keys[:, None], values[:, None], rank)]

    def encode_blocks(
        self, keys: Float32Array, values: Float32Array, rank: int
    ) -> list[list[QuantizedBlock]]:
        """Return a layer's blocks, made together, by head.

        Args:
            keys, values: float32 [kv_heads, m, n, head_dim], of m blocks of n tokens.
            rank: of the residuals.
        """
        heads, blocks, count, dim = keys.shape
        every = keys.reshape(-1, count, dim)
        found = self.find_outliers(every, self.outliers_per_side(count), -2)
        filled = np.where(found, every.mean(axis=1, keepdims=True), every)
        encoded = self._corrected(every, quantize_channels(filled, self.bits), found, rank)
        # A token's channels in all heads lie side by side.
        tokens = values.transpose(1, 2, 0, 3).reshape(blocks * count, heads * dim)
        found = self.find_outliers(tokens, self.outliers_per_side(heads * dim), -1)
        filled = np.where(found, tokens.mean(axis=1, keepdims=True), tokens)
        found, filled = (_by_head(part, heads, count) for part in (found, filled))
        groups = dim // self.group if dim % self.group == 0 else 1
        backbone = quantize_tokens(filled, self.bits, groups)
        pairs = zip(
            encoded,
            self._corrected(values.reshape(every.shape), backbone, found, rank),
            strict=True,
        )
        made = [QuantizedBlock.of(*streams) for streams in pairs]
        return [made[first : first + blocks] for first in range(0, len(made), blocks)]

    def _corrected(
        self,
        vectors: Float32Array,
        backbone: QuantizedVectors,
        outliers: BoolArray,
        rank: int,
    ) -> list[QuantizedVectors]:
        """Return each block's backbone with what it gets wrong.

        Args:
            vectors: float32 [m, n, head_dim], what the backbone stands for.
            backbone: of the m blocks.
            outliers: bool [m, n, head_dim].
            rank: of the residuals.
        """
        missing = vectors - backbone.decode()
        if rank := min(rank, *vectors.shape[1:]):
            residual = np.where(outliers, np.float32(0), missing)
            coefficients, basis = (part.astype(np.float16) for part in self.factors(residual, rank))
            backbone = replace(backbone, coefficients=coefficients, basis=basis)
            missing -= coefficients.astype(np.float32) @ basis.astype(np.float32)
        corrected = [backbone.of_block(number) for number in range(len(vectors))]
        for number, found in enumerate(outliers.reshape(len(outliers), -1)):
            places = np.flatnonzero(found)
            if len(places):
                corrected[number] = replace(
                    corrected[number],
                    outlier_places=places.astype(np.uint16),
                    outliers=missing[number].reshape(-1)[places].astype(np.float16),
                )
        return corrected

    def find_outliers(self, vectors: Float32Array, count: int, axis: int) -> BoolArray:
        """Return which numbers are among the ``count`` largest or smallest along an axis."""
        return extremes(vectors, count, axis)

    def factors(self, residual: Float32Array, rank: int) -> tuple[Float32Array, Float32Array]:
        """Return coefficients and basis of matrices; see ``low_rank``."""
        return low_rank(residual, rank)


@dataclass
class BlockwiseCompression:
    """Implements ``SequenceCompressor`` for one sequence.

    Attributes:
        method: the hyper-parameters.
        in_answer: whether the prompt is compressed.
    """

    method: Gear
    in_answer: bool = False

    def fork(self) -> "BlockwiseCompression":
        """See ``SequenceCompressor.fork``."""
        return replace(self)

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        """Do nothing: it observes no rows."""

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        """See ``SequenceCompressor.select``."""
        method, exact = self.method, int(keys.counts[0])
        rank = method.later_rank if self.in_answer else method.rank
        self.in_answer = True
        whole = exact // method.buffer * method.buffer
        if not whole:
            return None
        blocks = []
        for layer in range(keys.config.layers):
            first = layer * keys.config.kv_heads
            heads = range(first, first + keys.config.kv_heads)
            blocks += self._layer_blocks(*_read(keys, heads, whole), rank)
        kept = np.arange(whole, exact, dtype=np.int32)
        return Selection.of_heads([kept] * keys.heads, quantized=blocks)

    def _layer_blocks(
        self, keys: Float32Array, values: Float32Array, rank: int
    ) -> list[list[QuantizedBlock]]:
        """Return the blocks of a layer's tokens by head; keys and values are [heads, n, head_dim].

        All blocks but the last have as many tokens, and are made together.
        """
        heads, count, dim = keys.shape
        blocks: list[list[QuantizedBlock]] = [[] for _ in range(heads)]
        size = self.method.block
        whole = count // size * size
        for part in (slice(whole), slice(whole, count)):
            tokens = keys[:, part].shape[1]
            if tokens:
                shape = (heads, -1, min(size, tokens), dim)
                encoded = self.method.encode_blocks(
                    keys[:, part].reshape(shape), values[:, part].reshape(shape), rank
                )
                for own, later in zip(blocks, encoded, strict=True):
                    own += later
        return blocks


def extremes(vectors: Float32Array, count: int, axis: int) -> BoolArray:
    """Return which numbers are among the ``count`` largest or smallest along an axis.

    All are where an axis has no more than twice as many.
    """
    size = vectors.shape[axis]
    if 2 * count >= size:
        return np.ones(vectors.shape, bool)
    if not count:
        return np.zeros(vectors.shape, bool)
    # Sorting contiguous numbers is several times as fast as finding their places.
    rows = np.ascontiguousarray(np.moveaxis(vectors, axis, -1))
    ordered = np.sort(rows, axis=-1)
    low, high = ordered[..., count - 1 : count], ordered[..., size - count : size - count + 1]
    found = (rows <= low) | (rows >= high)
    # Of equal numbers at a limit only some are among them.
    tied = np.count_nonzero(found, axis=-1) > 2 * count
    found[tied] = _at_the_ends(rows[tied], count)
    return np.moveaxis(found, -1, axis)


def _at_the_ends(rows: Float32Array, count: int) -> BoolArray:
    """Return which numbers of each row [m, n] are first and last, ``count`` each, in order."""
    order = np.argpartition(rows, (count - 1, rows.shape[1] - count), -1)
    found = np.zeros(rows.shape, bool)
    for part in np.split(order, (count, rows.shape[1] - count), -1)[::2]:
        np.put_along_axis(found, part, True, -1)
    return found


def low_rank(matrices: Float32Array, rank: int) -> tuple[Float32Array, Float32Array]:
    """Return the best approximations of matrices in a low rank, nearly.

    Args:
        matrices: float32 [m, n, d].
        rank: at most n and d.

    Returns:
        Coefficients, orthonormal columns, float32 [m, n, rank], and a basis, float32
        [m, rank, d]: the matrices are about their products.
    """
    count, _, dim = matrices.shape
    directions = np.random.default_rng(0).standard_normal((rank, dim), np.float32).T
    basis = np.repeat(directions[None], count, axis=0)
    for iteration in range(_ITERATIONS):
        last = iteration == _ITERATIONS - 1
        if last:
            basis = np.linalg.qr(basis).Q
        coefficients = matrices @ basis
        if last:
            coefficients = np.linalg.qr(coefficients).Q
        basis = matrices.transpose(0, 2, 1) @ coefficients
    return coefficients, basis.transpose(0, 2, 1)


def _by_head(tokens: NDArray[_Number], heads: int, count: int) -> NDArray[_Number]:
    """Return [m * n, heads * head_dim] numbers as [heads * m, n, head_dim], given n."""
    split = tokens.reshape(len(tokens), heads, -1).transpose(1, 0, 2)
    return split.reshape(-1, count, split.shape[-1])


def _read(keys: SequenceKeys, heads: range, count: int) -> tuple[Float32Array, Float32Array]:
    """Return the first ``count`` keys and values of some heads: float32 [heads, n, head_dim]."""
    numbers = np.arange(count, dtype=np.int32)
    found = [keys.read(head, numbers) for head in heads]
    read_keys, values = (np.stack(part) for part in zip(*found, strict=True))
    return read_keys, values
