"""The shapes that sparse attention takes, as lists of keys: columns, diagonals, blocks."""

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int64Array
from midfill.runners.forward.attention import QUERY_BLOCK, SpanLists, query_blocks


def largest(scores: Float32Array, counts: Int64Array) -> BoolArray:
    """Return where each row's largest scores are; of equal ones, the first.

    Args:
        scores: [rows, n].
        counts: [rows], how many of each row, from 1 to n.
    """
    found = np.zeros(scores.shape, bool)
    width = scores.shape[1]
    for row, count, taken in zip(scores, counts.tolist(), found, strict=True):
        least = np.partition(row, width - count)[width - count]
        np.greater(row, least, out=taken)
        taken[np.flatnonzero(row == least)[: count - np.count_nonzero(taken)]] = True
    return found


def cross_mask(columns: BoolArray, diagonals: BoolArray, first: int, rows: int) -> BoolArray:
    """Return which keys lie on a column or on a diagonal of any row of a query block.

    A diagonal is a distance o: row i attends to key i - o. For a block of 64 rows that makes 64
    keys in a row, which lie on no grid.

    Args:
        columns: [heads, keys], the keys of all rows.
        diagonals: [heads, keys], the distances.
        first: position of the first row.
        rows: how many there are; the last one sees all keys.

    Returns:
        [blocks, heads, keys], for ``SpanLists.from_mask``; no key comes after its block.
    """
    heads, keys = columns.shape
    # reach[:, d]: whether a block whose end is d keys after a key attends to it.
    counts = np.zeros((heads, keys + QUERY_BLOCK + 1), np.int32)
    np.cumsum(diagonals, axis=1, out=counts[:, 1 : keys + 1])
    counts[:, keys + 1 :] = counts[:, keys : keys + 1]
    reach = counts > 0
    reach[:, QUERY_BLOCK:] = counts[:, QUERY_BLOCK:] > counts[:, :-QUERY_BLOCK]
    turned = np.zeros((heads, reach.shape[1] + keys), bool)
    turned[:, : reach.shape[1]] = reach[:, ::-1]
    mask = np.empty((query_blocks(rows), heads, keys), bool)
    for block, listed in enumerate(mask):
        end = first + (block + 1) * QUERY_BLOCK
        start = reach.shape[1] - 1 - end
        np.logical_or(turned[:, start : start + keys], columns, out=listed)
        listed[:, end:] = False
    return mask


def block_lists(pairs: BoolArray, block: int, first: int, rows: int) -> SpanLists:
    """Return the lists of whole blocks of keys.

    Args:
        pairs: [query blocks, heads, key blocks], whether the rows attend to the block.
        block: keys per block.
        first: position of the first row.
        rows: how many there are.
    """
    ends = first + np.minimum(np.arange(1, len(pairs) + 1) * QUERY_BLOCK, rows)
    starts = np.arange(pairs.shape[2]) * block
    lists = SpanLists.from_mask(pairs & (starts < ends[:, None])[:, None])
    spans = lists.spans * np.int32(block)
    counts = np.diff(lists.indptr[:: pairs.shape[1]])
    np.minimum(spans[:, 1], np.repeat(ends, counts), out=spans[:, 1], casting="same_kind")
    return SpanLists(lists.indptr, spans)


def block_mask(pairs: BoolArray, block: int, keys: int) -> BoolArray:
    """Return the keys of blocks: [query blocks, heads, keys] of [query blocks, heads, blocks]."""
    return np.repeat(pairs, block, axis=2)[:, :, :keys]
