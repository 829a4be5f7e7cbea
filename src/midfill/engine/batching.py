"""From scheduled sequences to one ForwardBatch."""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from midfill.engine.drafting import NO_DRAFT, Draft
from midfill.engine.sequence import Sequence
from midfill.forward.batch import ForwardBatch


class ScheduledSequence(NamedTuple):
    """A sequence's share of a step.

    Attributes:
        sequence: holds slots for all rows it runs.
        tokens: how many of its uncomputed tokens run.
        sampled: whether its last token is among them and a next token is sampled.
        draft: proposed next tokens.
        drafted: how many tokens of ``draft`` run after the last token.
    """

    sequence: Sequence
    tokens: int
    sampled: bool
    draft: Draft = NO_DRAFT
    drafted: int = 0

    @property
    def rows(self) -> int:
        """Tokens that go through the model."""
        return self.tokens + self.drafted

    def with_draft(self, draft: Draft, drafted: int) -> "ScheduledSequence":
        """Return the same share with a draft, of which ``drafted`` tokens run."""
        return ScheduledSequence(self.sequence, self.tokens, self.sampled, draft, drafted)


def build_batch(scheduled: SequenceOf[ScheduledSequence]) -> ForwardBatch:
    """Pack a step into one batch.

    Logits are computed for the last token of each sequence that samples, and for each of its
    drafted tokens, in the order of ``scheduled``.
    """
    token_ids, positions, write_slots, kv_slots = [], [], [], []
    query_ends, kv_ends, logit_rows = [0], [0], list[int]()
    for entry in scheduled:
        sequence, rows = entry.sequence, entry.rows
        assert sequence.kv is not None
        start = sequence.computed
        end = start + rows
        visible = sequence.kv.slots[:end]
        token_ids.append(sequence.uncomputed_tokens(entry.tokens))
        if entry.drafted:
            token_ids.append(entry.draft.tokens[: entry.drafted])
        positions.append(np.arange(start, end, dtype=np.int32))
        write_slots.append(visible[start:])
        kv_slots.append(visible)
        query_ends.append(query_ends[-1] + rows)
        kv_ends.append(kv_ends[-1] + end)
        if entry.sampled:
            logit_rows += range(query_ends[-1] - entry.drafted - 1, query_ends[-1])
    return ForwardBatch(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        write_slots=np.concatenate(write_slots),
        query_indptr=np.array(query_ends, dtype=np.int32),
        kv_indptr=np.array(kv_ends, dtype=np.int32),
        kv_slots=np.concatenate(kv_slots),
        logit_rows=np.array(logit_rows, dtype=np.int32),
    )
