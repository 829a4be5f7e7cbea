"""Packing: scheduled sequences become one ForwardBatch."""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from midfill.engine.sequence import Sequence
from midfill.forward.batch import ForwardBatch


class Scheduled(NamedTuple):
    """A sequence's part in a step.

    Attributes:
        sequence: holds slots for all that it runs.
        tokens: its next uncomputed tokens that run.
        sampled: whether its last token is among them and a next one is wanted; its drafted tokens
            run too then.
    """

    sequence: Sequence
    tokens: int
    sampled: bool

    @property
    def rows(self) -> int:
        """Tokens that go through the model."""
        return self.tokens + self.sequence.drafted


def pack(scheduled: SequenceOf[Scheduled]) -> ForwardBatch:
    """Lay a step out in one batch.

    Logits are wanted for the last token of every sequence that gets a next one, and for each of
    its drafted tokens, in the order of ``scheduled``.
    """
    token_ids, positions, write_slots, kv_slots = [], [], [], []
    query_ends, kv_ends, logit_rows = [0], [0], list[int]()
    for entry in scheduled:
        sequence, rows = entry.sequence, entry.rows
        assert sequence.kv is not None
        start = sequence.computed
        end = start + rows
        visible = sequence.kv.slots[:end]
        token_ids.append(sequence.rows(rows))
        positions.append(np.arange(start, end, dtype=np.int32))
        write_slots.append(visible[start:])
        kv_slots.append(visible)
        query_ends.append(query_ends[-1] + rows)
        kv_ends.append(kv_ends[-1] + end)
        if entry.sampled:
            logit_rows += range(query_ends[-1] - sequence.drafted - 1, query_ends[-1])
    return ForwardBatch(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        write_slots=np.concatenate(write_slots),
        query_indptr=np.array(query_ends, dtype=np.int32),
        kv_indptr=np.array(kv_ends, dtype=np.int32),
        kv_slots=np.concatenate(kv_slots),
        logit_rows=np.array(logit_rows, dtype=np.int32),
    )
