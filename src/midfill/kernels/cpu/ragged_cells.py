"""Cells that a request sees before its slots, other ones in each layer and head.

Kernels read keys through a list of slots and the place of the head's slot 0. A cell's number
counts from the cache's first cell, so a list of cells is such a list with the place 0. The cells
of a segment, and the slots that follow them, are gathered into one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.kv_cache import LayerKV
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.simd import LANES, fma, load, store
from midfill.kv.ragged import KeyTerms, RaggedIndex

SCORE_FACTOR, SCORE_BIAS, VALUE_FACTOR = 0, 1, 2


class RaggedCells(NamedTuple):
    """The ragged indices of a batch (``kv.ragged``).

    Attributes:
        first: int32 [requests], where in ``indptr`` a request's index starts, -1 if it has none;
            empty if no request has one.
        indptr: int32, of one index after another: layers * kv_heads + 1 places in ``cells`` each.
        cells: int32, numbers of cells.
        terms: float32 [3 * cells]: score factors, score biases and value factors; empty if no
            index has any.
    """

    first: Int32Array
    indptr: Int32Array
    cells: Int32Array
    terms: Float32Array


class HeadKeys(NamedTuple):
    """Where the keys of a request lie in one layer and head.

    Attributes:
        cells: how many are cells; these come first.
        cells_at: where they start in ``RaggedCells.cells``.
        slots_at: where in kv_slots the request's slots start.
        base: number of the head's cell of slot 0.
        has_terms: whether the cells have terms.
    """

    cells: int
    cells_at: int
    slots_at: int
    base: int
    has_terms: bool


def pack_ragged(indices: Sequence[RaggedIndex | None]) -> tuple[RaggedCells, Int32Array]:
    """Return the ragged indices of a batch as the kernels take them.

    Args:
        indices: one per request; empty if no request has one.

    Returns:
        The cells, and int32 [requests], the most cells that a layer's head sees.
    """
    present = [index for index in indices if index is not None]
    nothing = np.zeros(0, np.int32)
    if not present:
        return RaggedCells(nothing, nothing, nothing, np.zeros(0, np.float32)), nothing
    starts = np.cumsum([0, *(len(index.cells) for index in present)])
    places = np.cumsum([0, *(len(index.indptr) for index in present)])
    numbers = iter(places)
    first = [-1 if index is None else next(numbers) for index in indices]
    indptr = [index.indptr + start for index, start in zip(present, starts, strict=False)]
    ragged = RaggedCells(
        np.array(first, np.int32),
        np.concatenate(indptr).astype(np.int32),
        present[0].cells
        if len(present) == 1
        else np.concatenate([index.cells for index in present]),
        _pack_terms(present),
    )
    return ragged, np.array([0 if index is None else index.most for index in indices], np.int32)


def _pack_terms(indices: Sequence[RaggedIndex]) -> Float32Array:
    if all(index.terms is None for index in indices):
        return np.zeros(0, np.float32)
    terms = [index.terms or KeyTerms.neutral(len(index.cells)) for index in indices]
    parts = [
        *(term.score_factor for term in terms),
        *(term.score_bias for term in terms),
        *(term.value_factor for term in terms),
    ]
    return np.concatenate(parts)


@inlined_kernel
def find_keys(ragged: RaggedCells, request: int, kv: LayerKV, head: int, slots_at: int) -> HeadKeys:
    """Return where the keys of a request's head lie; ``slots_at`` as of HeadKeys."""
    base = kv.first_entry + head * kv.slots
    start, end = 0, 0
    if len(ragged.first) > 0 and ragged.first[request] >= 0:
        place = ragged.first[request] + base // kv.slots
        start, end = int(ragged.indptr[place]), int(ragged.indptr[place + 1])
    has_terms = len(ragged.terms) > 0 and end > start
    return HeadKeys(end - start, start, slots_at, base, has_terms)


@kernel
def list_cells(
    ragged: RaggedCells, slots: Int32Array, keys: HeadKeys, start: int, count: int,
    out: Int32Array, place: int,
) -> None:  # fmt: skip
    """Write the cells of ``count`` keys, from number ``start`` on, to out[place:]."""
    kept = min(max(keys.cells - start, 0), count)
    for i in range(kept):
        out[place + i] = ragged.cells[keys.cells_at + start + i]
    slots_at = keys.slots_at + start - keys.cells
    for i in range(kept, count):
        out[place + i] = np.int32(keys.base + slots[slots_at + i])


@kernel
def gather_term(
    ragged: RaggedCells, keys: HeadKeys, term: int, first: int, neutral: float,
    gathered: Float32Array, at: int,
) -> None:  # fmt: skip
    """Write a term of 16 keys to gathered[at:at + 16]; keys that are slots have the neutral one."""
    terms_at = term * len(ragged.cells) + keys.cells_at
    for i in range(LANES):
        key = first + i
        inside = key < keys.cells
        gathered[at + i] = ragged.terms[terms_at + key] if inside else np.float32(neutral)


@kernel
def change_scores(
    ragged: RaggedCells, keys: HeadKeys, start: int, count: int, gathered: Float32Array,
    rows: int, scores: Float32Array,
) -> None:  # fmt: skip
    """scores[rows, 256] = scores * factor + bias, for the keys of a segment.

    Args:
        ragged: holds the terms.
        keys: of the head.
        start: number of the segment's first key.
        count: keys in the segment.
        gathered: float32 [32], scratch.
        rows: of ``scores``.
        scores: float32 [rows * 256].
    """
    for part in range(0, min(count, keys.cells - start), LANES):
        gather_term(ragged, keys, SCORE_FACTOR, start + part, 1.0, gathered, 0)
        gather_term(ragged, keys, SCORE_BIAS, start + part, 0.0, gathered, LANES)
        factor, bias = load(gathered, 0), load(gathered, LANES)
        for row in range(rows):
            at = row * SEGMENT + part
            store(scores, at, fma(load(scores, at), factor, bias))
