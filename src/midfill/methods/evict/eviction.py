"""Eviction: applies what a method decides about a sequence's KV.

A method decides once the prompt is computed. Until then its KV is exact, chunk after chunk, and
goes to the prefix cache like any other, where the document's next request finds it. Then the cells
that stay are copied into slots of the sequence's own, packed, and its path in the cache is
released. Whatever follows is computed over the cells. A method with an interval decides again and
again while the answer grows: it sees the cells and the slots of later tokens as one list of keys,
and what stays is packed into the sequence's slots anew, where cells move only into places of those
that don't stay. Where keys lie side by side, positions never come to an end: before they would, all
keys move to the first ones, and the next token after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from midfill.arrays import BoolArray, Int32Array, Int64Array
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.pool import KVPool
from midfill.kv.quantized import QuantizedBlock, QuantizedBlocks, cell_arrays
from midfill.kv.ragged import KeyTerms, RaggedIndex, cells_of_slots
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.methods.evict.state import CompressionState
from midfill.runners.forward.runner import Runner


class Eviction:
    """Shows methods the keys of sequences, and moves cells as they decide.

    Args:
        runner: the model and its KV cache.
        pool: the runner's slots.

    Attributes:
        full_layers: the layers that methods decide on.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self._runner = runner
        self.pool = pool
        self.full_layers = FullLayers(runner.config)

    def show_blocks(self, state: CompressionState, kv: SequenceKV, computed: int) -> None:
        """Show a method the blocks of observed rows that are complete.

        Args:
            state: the method at work.
            kv: the sequence's.
            computed: number of its computed tokens.
        """
        while (block := state.take_block(computed)) is not None:
            end, queries = block
            seen = self.full_layers.keys(self.keys(kv, end))
            state.compressor.observe(seen, queries)

    def evict(self, state: CompressionState, kv: SequenceKV, point: int) -> bool:
        """Have a method decide, and do what it decides.

        Args:
            state: the method at work.
            kv: the sequence's.
            point: number of its computed tokens.

        Returns:
            False if there is no room for the cells, since other sequences use the prompt's slots.
            The sequence holds its slots as before then, and has to be preempted.
        """
        keys = self.keys(kv, point)
        selection = state.compressor.select(self.full_layers.keys(keys), state.take())
        state.pass_point(point)
        ahead = state.tokens_ahead
        prefix = kv.prefix
        if selection is None and prefix is not None and prefix.gapless:
            ends = self._ends(point - prefix.origin + ahead)
            selection = Selection.of_all(keys.counts) if ends else None
        return selection is None or self.apply(kv, keys, selection, point, ahead)

    def apply(
        self,
        kv: SequenceKV,
        keys: SequenceKeys,
        selection: Selection,
        point: int,
        ahead: int = 0,
    ) -> bool:
        """Do what a method has decided about a sequence's first ``point`` tokens.

        Args:
            kv: the sequence's.
            keys: of these tokens, in all layers.
            selection: what stays, in the layers that methods decide on.
            point: number of its computed tokens.
            ahead: how many tokens may follow until the next decision.

        Returns:
            See ``evict``.
        """
        seen = self.full_layers.keys(keys)
        selection.check(seen.counts, seen.quantized_counts)
        selection = self.full_layers.complete(selection, keys.counts)
        if kv.prefix is not None and kv.prefix.gapless != selection.close_gaps:
            raise ValueError("gaps have to be closed every time or never")
        origin = 0 if kv.prefix is None else kv.prefix.origin
        if selection.close_gaps and self._ends(point - origin + ahead):
            origin = point - int(selection.indptr[1])
        return self._replace(kv, keys, selection, point, origin)

    def keys(self, kv: SequenceKV, tokens: int) -> SequenceKeys:
        """Return a view of the keys of a sequence's first tokens."""
        config = self._runner.config
        heads = config.layers * config.kv_heads
        own = cells_of_slots(kv.slots[: tokens - kv.first], heads, self._runner.slots)
        if kv.prefix is None:
            return SequenceKeys(config, list(own), self._runner.cells)
        index = kv.prefix.index
        kept = np.split(index.cells, index.indptr[1:-1])
        cells = [np.concatenate(pair) for pair in zip(kept, own, strict=True)]
        return SequenceKeys(config, cells, self._runner.cells, index.quantized)

    def _ends(self, position: int) -> bool:
        """Whether there are fewer positions than that."""
        return position > self._runner.config.context

    def _replace(
        self, kv: SequenceKV, keys: SequenceKeys, selection: Selection, tokens: int, origin: int
    ) -> bool:
        """Pack the cells that stay into slots of the sequence's own, and release all others."""
        back = origin - (0 if kv.prefix is None else kv.prefix.origin)
        store, layout, added = self._runner.cells, _Layout.of(selection), selection.added
        terms = layout.terms(selection.terms or _kept_terms(kv, selection), added)
        shared = kv.prefix is not None and kv.prefix.index.shared
        # Where each kept key's cell is among the distinct ones, and a key of each of these.
        exact, first, entries = _distinct(_kept_cells(keys, selection), shared=shared)
        blocks = _Blocks.of(kv, selection, sum(store.layout.widths))
        kept = np.concatenate((exact, blocks.kept))
        stored = 0 if added is None else len(added.keys)
        slots_needed = -(-(len(kept) + stored + blocks.filled) // keys.heads)
        released = self.pool.cache.released_by(kv.nodes) + kv.owned
        if self.pool.available + released < slots_needed:
            return False
        stays, taken = self._standing(kept, kv.own_slots()[:slots_needed], slots_needed)
        shift = np.zeros(len(kept), np.int32)
        shift[: len(exact)] = selection.shift(keys.counts, back)[first]
        moving, turning = np.flatnonzero(~stays & (shift == 0)), np.flatnonzero(shift)
        moved = store.take(kept[moving])
        turned = store.take(kept[turning], shift[turning] if len(turning) else None)
        numbers = layout.numbers(kv, selection)
        slots = kv.exchange(slots_needed)
        # Any cell of the slots will do: a head's cells may lie in other heads' part of a slot.
        free = cells_of_slots(slots, keys.heads, self._runner.slots)[~taken]
        places = kept.copy()
        packed = np.count_nonzero(~stays)
        places[~stays] = free[:packed]
        written, encoded = np.split(free[packed : packed + stored + blocks.filled], [stored])
        cells = np.empty(layout.count, np.int32)
        cells[layout.kept] = places[entries]
        if added is not None:
            cells[layout.added] = written[added.entries()]
            shared |= added.listed is not None
        quantized = blocks.placed(places[len(exact) :], encoded)
        index = RaggedIndex(cells, layout.indptr, terms, shared, quantized)
        # The slots have an owner before anything can fail.
        gapless = selection.close_gaps
        kv.prefix = CompressedPrefix(
            tokens, index, slots, self.pool.slots, gapless, numbers, origin
        )
        store.put(places[moving], moved)
        store.put(places[turning], turned)
        if added is not None:
            store.write(written, added.keys, added.values)
        if blocks.filled:
            store.restore(encoded, blocks.arrays())
        return True

    def _standing(
        self, kept: Int32Array, own: Int32Array, slots: int
    ) -> tuple[BoolArray, BoolArray]:
        """Find the cells that can stay where they are: those in the sequence's own slots.

        Args:
            kept: [n] int32, the cells to keep.
            own: the first of the slots that will hold them.
            slots: how many slots that will be.

        Returns:
            bool [n], and bool [layers * kv_heads, slots]: which cells of the slots they are.
        """
        config, total = self._runner.config, self._runner.slots
        numbers = np.full(total, -1, np.int32)
        numbers[own] = np.arange(len(own), dtype=np.int32)
        head, slot = np.divmod(kept, np.int32(total))
        number = numbers[slot]
        stays: BoolArray = number >= 0
        taken = np.zeros((config.layers * config.kv_heads, slots), bool)
        taken[head[stays], number[stays]] = True
        return stays, taken


@dataclass(frozen=True)
class _Layout:
    """Where a selection's keys go in the new index: each head's added ones, then its kept ones.

    Attributes:
        indptr: [heads + 1] int32, of the index.
        added, kept: [n] int64, their places in it.
    """

    indptr: Int32Array
    added: Int64Array
    kept: Int64Array

    @classmethod
    def of(cls, selection: Selection) -> "_Layout":
        if selection.added is None:
            nothing, every = np.zeros(0, np.int64), np.arange(len(selection.kept))
            return cls(selection.indptr, nothing, every)
        indptr = selection.indptr + selection.added.indptr
        is_added = np.zeros(indptr[-1], bool)
        for start, count in zip(indptr, np.diff(selection.added.indptr), strict=False):
            is_added[start : start + count] = True
        return cls(indptr, np.flatnonzero(is_added), np.flatnonzero(~is_added))

    @property
    def count(self) -> int:
        """Number of keys."""
        return int(self.indptr[-1])

    def numbers(self, kv: SequenceKV, selection: Selection) -> Int32Array:
        """Return which token each key is of, -1 where it stands for several: [count] int32."""
        numbers = np.full(self.count, -1, np.int32)
        numbers[self.kept] = _token_numbers(kv, selection.indptr, selection.kept)
        added = selection.added
        if added is not None and added.replaced is not None:
            numbers[self.added] = _token_numbers(kv, added.indptr, added.replaced)
        return numbers

    def terms(self, of_kept: KeyTerms | None, added: AddedKeys | None) -> KeyTerms | None:
        """Return the terms of all keys; None if none has any."""
        of_added = None if added is None else added.terms
        if added is None or (of_kept is None and of_added is None):
            return of_kept
        terms = KeyTerms.neutral(self.count)
        for places, given in ((self.kept, of_kept), (self.added, of_added)):
            if given is not None:
                terms.put(places, given)
        return terms


@dataclass(frozen=True)
class _Blocks:
    """A sequence's quantised blocks: those that it has, and those that come to them.

    Attributes:
        before: what it has; None if that is nothing.
        added: of each head; empty if no head gets any.
        cell_bytes: of a cell's K and V together.
    """

    before: QuantizedBlocks | None
    added: Sequence[Sequence[QuantizedBlock]]
    cell_bytes: int

    @classmethod
    def of(cls, kv: SequenceKV, selection: Selection, cell_bytes: int) -> "_Blocks":
        before = None if kv.prefix is None else kv.prefix.index.quantized
        return cls(before, selection.quantized or (), cell_bytes)

    @property
    def kept(self) -> Int32Array:
        """The cells of those that it has: [n] int32."""
        return np.zeros(0, np.int32) if self.before is None else self.before.cells

    @property
    def filled(self) -> int:
        """How many cells those fill that come."""
        return sum(block.cells(self.cell_bytes) for head in self.added for block in head)

    def placed(self, kept: Int32Array, filled: Int32Array) -> QuantizedBlocks | None:
        """Return all blocks, given where the cells of both kinds are from now on."""
        before = None if self.before is None else replace(self.before, cells=kept)
        if not len(filled):
            return before
        later = QuantizedBlocks.of_heads(self.added, filled, self.cell_bytes)
        return later if before is None else before.joined(later)

    def arrays(self) -> tuple[NDArray[np.uint8], ...]:
        """Return what the cells of those that come hold."""
        return cell_arrays([block for head in self.added for block in head], self.cell_bytes)


def _distinct(cells: Int32Array, *, shared: bool) -> tuple[Int32Array, Int64Array, Int64Array]:
    """Return cells without repetitions, which only ``shared`` ones may have.

    Returns:
        [n] int32, the cells; [n] where each is listed first; [len(cells)] which of them each is.
    """
    if not shared:
        every = np.arange(len(cells))
        return cells, every, every
    found, first, entries = np.unique(cells, return_index=True, return_inverse=True)
    return found, first, entries


def _kept_cells(keys: SequenceKeys, selection: Selection) -> Int32Array:
    """Return the cells that stay, in the selection's order."""
    parts = [
        keys.cells(head)[selection.kept[selection.indptr[head] : selection.indptr[head + 1]]]
        for head in range(keys.heads)
    ]
    return np.concatenate(parts)


def _kept_terms(kv: SequenceKV, selection: Selection) -> KeyTerms | None:
    """Return the terms that the cells that stay have had so far."""
    index = None if kv.prefix is None else kv.prefix.index
    if index is None or index.terms is None:
        return None
    counts = np.diff(index.indptr)
    head = np.repeat(np.arange(len(counts)), np.diff(selection.indptr))
    number = index.indptr[head] + selection.kept
    return index.terms.take(np.where(selection.kept < counts[head], number, -1))


def _token_numbers(kv: SequenceKV, indptr: Int32Array, keys: Int32Array) -> Int32Array:
    """Return which tokens keys are of, -1 for one that stands for several: [n] int32.

    Args:
        kv: the sequence's, as it is now.
        indptr: [heads + 1] int32, from where to where ``keys`` has each head's.
        keys: [n] int32, numbered as their heads hold them now.
    """
    prefix = kv.prefix
    if prefix is None:
        return keys
    counts = np.diff(indptr)
    head = np.repeat(np.arange(len(counts)), counts)
    before = np.diff(prefix.index.indptr)[head]
    numbers: Int32Array = (keys - before + np.int32(kv.first)).astype(np.int32)
    is_earlier = keys < before
    places = prefix.index.indptr[head] + keys
    numbers[is_earlier] = prefix.numbers[places[is_earlier]]
    return numbers
