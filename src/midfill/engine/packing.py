"""Packing: scheduled sequences become one ForwardBatch."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from midfill.engine.batch import ForwardBatch
from midfill.engine.sequence import Sequence


def pack(scheduled: SequenceOf[tuple[Sequence, int]]) -> ForwardBatch:
    """Lay out the next ``count`` uncomputed tokens of each (sequence, count) in one batch.

    Logits are wanted for the last row of every sequence whose tokens end with this batch, unless
    it runs in the background. Each sequence must hold slots for the tokens it runs.
    """
    token_ids, positions, write_slots, kv_slots = [], [], [], []
    query_ends, kv_ends, logit_rows = [0], [0], []
    for sequence, count in scheduled:
        assert sequence.kv is not None
        start = sequence.computed
        end = start + count
        visible = sequence.kv.slots[:end]
        token_ids.append(sequence.tokens[start:end])
        positions.append(np.arange(start, end, dtype=np.int32))
        write_slots.append(visible[start:])
        kv_slots.append(visible)
        query_ends.append(query_ends[-1] + count)
        kv_ends.append(kv_ends[-1] + end)
        if end == sequence.length and not sequence.background:
            logit_rows.append(query_ends[-1] - 1)
    return ForwardBatch(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        write_slots=np.concatenate(write_slots),
        query_indptr=np.array(query_ends, dtype=np.int32),
        kv_indptr=np.array(kv_ends, dtype=np.int32),
        kv_slots=np.concatenate(kv_slots),
        logit_rows=np.array(logit_rows, dtype=np.int32),
    )
