"""Compression: applies what a method decides about a sequence's KV.

A method decides once the prompt is computed. Until then its KV is exact, chunk after chunk, and
goes to the prefix cache like any other, where the document's next request finds it. Then the cells
that stay are copied into slots of the sequence's own, packed, and its path in the cache is
released. Whatever follows is computed over the cells, so a step never crosses that point: neither
a chunk nor a draft, and a preempted answer stops there again when it is computed anew.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np

from midfill.arrays import Int32Array
from midfill.compression.method import SequenceKeys
from midfill.compression.selection import Selection
from midfill.engine.batching import ScheduledSequence, observed_rows
from midfill.engine.sequence import Sequence
from midfill.forward.batch import ForwardBatch
from midfill.forward.runner import Runner
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.pool import KVPool
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.kv.sequence_kv import SequenceKV


class Compression:
    """The engine's part of every method: observation, and the move of cells.

    Args:
        runner: the model and its KV cache.
        pool: the runner's slots.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self._runner = runner
        self._pool = pool

    def observe(self, batch: ForwardBatch, scheduled: SequenceOf[ScheduledSequence]) -> None:
        """Hand the queries of a batch's observed rows to their sequences, after the step."""
        if not len(batch.observed_rows):
            return
        queries = self._runner.observed_queries(batch)
        at = 0
        for entry in scheduled:
            rows = len(observed_rows(entry))
            if rows:
                entry.sequence.observe(queries[:, at : at + rows])
            at += rows

    def compress(self, sequence: Sequence) -> bool:
        """Have a sequence's method decide, if it has one that hasn't, and do what it decides.

        The tokens that it sees have just been computed, and are cached.

        Returns:
            False if there is no room for the cells, since other sequences use the prompt's slots.
            The sequence holds its slots as before then, and has to be preempted.
        """
        compressor, kv = sequence.compressor, sequence.kv
        if compressor is None or kv is None or sequence.compressed:
            return True
        config = self._runner.config
        heads = config.layers * config.kv_heads
        tokens = sequence.compress_after
        cells = cells_of_slots(kv.slots[:tokens], heads, self._runner.slots)
        keys = SequenceKeys(config, list(cells), self._runner.cells)
        selection = compressor.select(keys, sequence.take_observed())
        sequence.compressed = True
        if selection is None:
            return True
        selection.check(keys.counts)
        return self._replace(kv, keys, selection, tokens)

    def _replace(
        self, kv: SequenceKV, keys: SequenceKeys, selection: Selection, tokens: int
    ) -> bool:
        """Copy the cells that stay into slots of their own, and release those they were in."""
        kept = _kept_cells(keys, selection)
        slots_needed = -(-len(kept) // keys.heads)
        released = self._pool.cache.released_by([kv.node]) + kv.owned
        if self._pool.available + released < slots_needed:
            return False
        stored = self._runner.cells.take(kept)
        kv.discard()
        slots = self._pool.allocate(slots_needed)
        # Any cell of the new slots will do: a head's cells may lie in other heads' part of a slot.
        target = cells_of_slots(slots, keys.heads, self._runner.slots).reshape(-1)[: len(kept)]
        self._runner.cells.put(target, stored)
        index = RaggedIndex(target, selection.indptr, selection.terms)
        kv.compress(CompressedPrefix(tokens, index, slots, self._pool.slots))
        return True


def _kept_cells(keys: SequenceKeys, selection: Selection) -> Int32Array:
    """Return the cells that stay, in the selection's order."""
    parts = [
        keys.cells(head)[selection.kept[selection.indptr[head] : selection.indptr[head + 1]]]
        for head in range(keys.heads)
    ]
    return np.concatenate(parts)
