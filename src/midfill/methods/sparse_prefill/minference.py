"""MInference: each head's attention has one of three shapes; where it lies is found per prompt.

Source: Jiang et al., "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic
Sparse Attention", NeurIPS 2024, arXiv 2407.02490.

A shape per query head is found once per model (``minference_search``): *A* (the first keys and a
window), *vertical-slash* (some columns and some diagonals) or *blocks* (whole blocks of keys by
their mean). The last 64 rows' attention, added up by key and by distance, tells the columns and
diagonals; mean queries times mean keys tell the blocks.

What differs from the paper: columns, diagonals and windows are shares of the keys at hand, since
the published numbers (1000 columns and 6096 diagonals) are everything in a prompt of 8,000 tokens.
Prompts run in chunks, and each chunk is looked at by its own last rows. The published tables hold
vertical-slash only: here all three shapes compete.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from midfill.arrays import BoolArray, Float32Array
from midfill.methods.budget import require
from midfill.methods.calibration import Tables
from midfill.methods.calibration_store import load_tables
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_prefill.method import PROBED_ROWS, ChunkRule, PrefillMethod
from midfill.methods.sparse_prefill.patterns import block_mask, cross_mask, largest
from midfill.runners.forward.attention import QUERY_BLOCK, LayerProbe, SpanLists, query_blocks

NAME, VERSION = "minference", 1
SINKS, LOCAL = 30, 100
"""Columns and diagonals that vertical-slash always has; the paper's."""
MIN_COLUMNS, MIN_DIAGONALS = 30, 50


class Shape(IntEnum):
    """What a head's attention looks like."""

    A = 0
    VERTICAL_SLASH = 1
    BLOCKS = 2


class Pattern(NamedTuple):
    """A head's shape and its size.

    Attributes:
        shape: which.
        columns: of A, the first keys; of vertical-slash, the columns; of blocks, the keys in
            blocks. A share of the keys at hand.
        diagonals: of A, the window; of vertical-slash, the diagonals. A share as well.
    """

    shape: Shape
    columns: float
    diagonals: float


CANDIDATES = (
    Pattern(Shape.A, 0.02, 0.18),
    Pattern(Shape.A, 0.05, 0.15),
    Pattern(Shape.A, 0.1, 0.1),
    Pattern(Shape.VERTICAL_SLASH, 0.01, 0.03),
    Pattern(Shape.VERTICAL_SLASH, 0.01, 0.06),
    Pattern(Shape.VERTICAL_SLASH, 0.03, 0.02),
    Pattern(Shape.VERTICAL_SLASH, 0.05, 0.04),
    Pattern(Shape.VERTICAL_SLASH, 0.1, 0.02),
    Pattern(Shape.VERTICAL_SLASH, 0.1, 0.04),
    Pattern(Shape.VERTICAL_SLASH, 0.15, 0.02),
    Pattern(Shape.BLOCKS, 0.2, 0.0),
)
"""What the search chooses from; ``minference_search`` says how they are made to cost the same."""


@dataclass(frozen=True)
class MInference:
    """The method's hyper-parameters.

    Attributes:
        scale: factor of all sizes that the search has found.
        chunk: tokens per chunk.
        dense: chunks whose last row sees at most so many keys attend to all.
    """

    scale: float = 1.0
    chunk: int = 1024
    dense: int = 1024

    def __post_init__(self) -> None:
        require(0 < self.scale <= 100, f"scale must be above 0 and at most 100, not {self.scale:g}")
        ChunkRule(self.chunk, self.dense)

    def for_model(self, model: ServedModel) -> PrefillMethod:
        """See ``ModelSpecific.for_model``."""
        tables = load_tables(NAME, VERSION, model)
        return HeadPatterns(
            f"{NAME}:scale={self.scale:g},chunk={self.chunk},dense={self.dense}",
            ChunkRule(self.chunk, self.dense),
            choose_patterns(tables, self.scale),
        )


@dataclass(frozen=True)
class HeadPatterns:
    """Patterns of all heads; implements ``PrefillMethod``.

    Attributes:
        variant: see ``PrefillMethod``.
        rule: the chunks.
        patterns: per layer, those of its query heads.
    """

    variant: str
    rule: ChunkRule
    patterns: tuple[tuple[Pattern, ...], ...]

    @property
    def chunk_tokens(self) -> int:
        """See ``PrefillMethod``."""
        return self.rule.tokens

    def is_dense(self, first: int, rows: int) -> bool:
        """See ``PrefillMethod``."""
        return self.rule.is_dense(first, rows)

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        return SpanLists.from_mask(pattern_mask(probe, self.patterns[probe.layer]))


class PatternProbe(Protocol):
    """What patterns look at of a layer: a part of ``LayerProbe``, which see for all of it."""

    first: int
    rows: int
    query_heads: int
    kv_heads: int

    def masses(self, rows: int) -> tuple[Float32Array, Float32Array]:
        """Return how much attention the last rows pay to each key and to each distance."""

    def mean_queries(self, block: int) -> Float32Array:
        """Return the mean query of each ``block`` rows: [query_heads, blocks, head_dim]."""

    def mean_keys(self, block: int) -> Float32Array:
        """Return the mean key of each ``block`` keys: [kv_heads, blocks, head_dim]."""


def pattern_mask(probe: PatternProbe, patterns: tuple[Pattern, ...]) -> BoolArray:
    """Return which keys the query blocks attend to: [blocks, query_heads, keys].

    Args:
        probe: the layer.
        patterns: of its query heads.
    """
    keys = probe.first + probe.rows
    column_mass, diagonal_mass = probe.masses(min(PROBED_ROWS, probe.rows))
    columns, diagonals = _crosses(column_mass, diagonal_mass, patterns, keys)
    mask = cross_mask(columns, diagonals, probe.first, probe.rows)
    heads = [h for h, pattern in enumerate(patterns) if pattern.shape is Shape.BLOCKS]
    if heads:
        counts = [max(1, math.ceil(patterns[h].columns * keys / QUERY_BLOCK)) for h in heads]
        pairs = _block_pairs(probe, heads, counts)
        mask[:, heads] |= block_mask(pairs, QUERY_BLOCK, keys)
    return mask


def _crosses(
    column_mass: Float32Array, diagonal_mass: Float32Array, patterns: tuple[Pattern, ...], keys: int
) -> tuple[BoolArray, BoolArray]:
    """Return the columns and the diagonals of all heads: [query_heads, keys] each.

    Heads that attend to blocks have those of their own block.
    """
    columns, diagonals = np.zeros_like(column_mass, bool), np.zeros_like(diagonal_mass, bool)
    for head, pattern in enumerate(patterns):
        wide, long = round(pattern.columns * keys), round(pattern.diagonals * keys)
        if pattern.shape is Shape.A:
            columns[head, : max(1, wide)] = True
            diagonals[head, : max(1, long)] = True
    crossed = [h for h, pattern in enumerate(patterns) if pattern.shape is Shape.VERTICAL_SLASH]
    if crossed:
        shares = np.array([patterns[h][1:] for h in crossed])
        sizes = np.rint(shares * keys).astype(np.int64)
        sizes = np.clip(sizes, (MIN_COLUMNS, MIN_DIAGONALS), keys).clip(max=keys)
        for mass, found, always, count in (
            (column_mass, columns, SINKS, sizes[:, 0]),
            (diagonal_mass, diagonals, LOCAL, sizes[:, 1]),
        ):
            scores = mass[crossed]
            scores[:, :always] = np.inf
            found[crossed] = largest(scores, count)
    diagonals[:, 0] = True  # whatever the numbers: a row attends to itself
    return columns, diagonals


def _block_pairs(probe: PatternProbe, heads: list[int], counts: list[int]) -> BoolArray:
    """Return the best blocks of keys of each query block: [query blocks, heads, key blocks]."""
    group = probe.query_heads // probe.kv_heads
    queries = probe.mean_queries(QUERY_BLOCK)[heads]
    keys = probe.mean_keys(QUERY_BLOCK)[[head // group for head in heads]]
    scores = np.einsum("hqd,hkd->qhk", queries, keys).astype(np.float32)
    blocks = query_blocks(probe.rows)
    own = (probe.first + np.arange(blocks) * QUERY_BLOCK) // QUERY_BLOCK
    later = np.arange(scores.shape[2]) > own[:, None, None]
    scores[np.broadcast_to(later, scores.shape)] = -np.inf
    number = np.minimum(np.array(counts, np.int64), scores.shape[2])
    flat = scores.reshape(-1, scores.shape[2])
    found = largest(flat, np.tile(number, blocks)).reshape(scores.shape)
    return found & ~later


def choose_patterns(tables: Tables, scale: float) -> tuple[tuple[Pattern, ...], ...]:
    """Return the pattern of each query head of each layer.

    Args:
        tables: "pattern" [layers, query_heads], a number in ``CANDIDATES``; "size" [layers,
            query_heads], the factor of its size.
        scale: another factor.
    """
    sizes = tables["size"] * scale
    return tuple(
        tuple(
            Pattern(CANDIDATES[number].shape, *(size * length for length in CANDIDATES[number][1:]))
            for number, size in zip(layer.astype(int).tolist(), row.tolist(), strict=True)
        )
        for layer, row in zip(tables["pattern"], sizes, strict=True)
    )
