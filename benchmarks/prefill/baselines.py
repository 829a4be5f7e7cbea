"""What methods of sparse prefill are compared with: lists of the same length that know nothing."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from midfill.arrays import BoolArray
from midfill.methods.sparse_prefill.chunks import ChunkRule
from midfill.methods.sparse_prefill.minference import LOCAL, SINKS
from midfill.methods.sparse_prefill.patterns import cross_mask
from midfill.runners.forward.attention import QUERY_BLOCK, LayerProbe, SpanLists, query_blocks

_SINK_SHARE = 0.1
_HALVINGS = 16


@dataclass(frozen=True)
class OwnBlock:
    """Lists each block's own keys only: what is left of a prefill without attention.

    Attributes:
        rule: the chunks.
    """

    rule: ChunkRule

    @property
    def variant(self) -> str:
        """See ``PrefillMethod``."""
        return repr(self)

    @property
    def chunk_tokens(self) -> int:
        """See ``PrefillMethod``."""
        return self.rule.tokens

    def is_dense(self, first: int, rows: int) -> bool:
        """Return whether the chunk has fewer rows than a block."""
        return rows < QUERY_BLOCK

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        lists = SpanLists.of_everything(probe.query_heads, probe.first, probe.rows)
        lists.spans[:, 0] = np.maximum(lists.spans[:, 1] - QUERY_BLOCK, 0)
        return lists


@dataclass(frozen=True)
class AShape(OwnBlock):
    """The first keys and a window, in every head.

    Attributes:
        share: of the keys at hand; a tenth of it are first keys.
    """

    share: float

    def is_dense(self, first: int, rows: int) -> bool:
        """See ``PrefillMethod``."""
        return self.rule.is_dense(first, rows)

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        mask = self.mask(probe.first, probe.rows)
        return SpanLists.from_mask(np.repeat(mask, probe.query_heads, axis=1))

    def mask(self, first: int, rows: int) -> BoolArray:
        """Return what one head attends to: [blocks, 1, keys]."""
        keys = first + rows
        columns, diagonals = np.zeros((2, 1, keys), bool)
        columns[0, : round(_SINK_SHARE * self.share * keys)] = True
        diagonals[0, : max(1, round((1 - _SINK_SHARE) * self.share * keys))] = True
        return cross_mask(columns, diagonals, first, rows)


@dataclass(frozen=True)
class RandomCross(AShape):
    """The first keys, the nearest ones, and columns and diagonals at random, in every head.

    Half of the lists' lengths comes from columns, half from diagonals.
    """

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        masks = [
            self.mask(probe.first, probe.rows, (probe.layer, head))
            for head in range(probe.query_heads)
        ]
        return SpanLists.from_mask(np.concatenate(masks, axis=1))

    def mask(self, first: int, rows: int, seed: tuple[int, ...] = (0, 0)) -> BoolArray:
        """Return what one head attends to: [blocks, 1, keys]."""
        keys = first + rows
        rng = np.random.default_rng((*seed, first))
        columns, diagonals = np.zeros((2, 1, keys), bool)
        columns[0, :SINKS] = True
        diagonals[0, :LOCAL] = True
        wanted = self.share * keys / 2
        columns[0, rng.choice(keys, min(keys, round(wanted)), replace=False)] = True
        diagonals[0, rng.choice(keys, min(keys, round(wanted / QUERY_BLOCK)), replace=False)] = True
        return cross_mask(columns, diagonals, first, rows)


def of_equal_cost(
    make: Callable[[ChunkRule, float], AShape], rule: ChunkRule, tokens: int, pairs: float
) -> AShape:
    """Return a baseline that computes about as many products per head as a method does.

    Args:
        make: returns the baseline for a share of the keys.
        rule: its chunks.
        tokens: of the prompt.
        pairs: products per layer and head in the chunks that are listed.
    """
    low, high = 0.0, 2.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _pairs(make(rule, middle), tokens) < pairs:
            low = middle
        else:
            high = middle
    return make(rule, low)


def _pairs(method: AShape, tokens: int) -> int:
    """Return the products of one layer and head over a prompt."""
    size, total = method.rule.tokens, 0
    for first in range(0, tokens, size):
        rows = min(size, tokens - first)
        if not method.is_dense(first, rows):
            counts = np.minimum(QUERY_BLOCK, rows - np.arange(query_blocks(rows)) * QUERY_BLOCK)
            total += int((method.mask(first, rows).sum(axis=(1, 2)) * counts).sum())
    return total
