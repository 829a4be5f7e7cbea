"""From scheduled sequences to one ForwardBatch."""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from midfill.engine.drafting import NO_DRAFT, Draft
from midfill.engine.sequence import Sequence
from midfill.forward.batch import ForwardBatch
from midfill.kv.ragged import RaggedIndex


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

    @property
    def scored_rows(self) -> range:
        """Its rows, counted from its first one, whose logits score the prompt's next token."""
        sequence = self.sequence
        next_scored = sequence.next_scored
        if next_scored is None:
            return range(0)
        first = max(next_scored - 1 - sequence.computed, 0)
        end = min(self.tokens, sequence.prompt_length - 1 - sequence.computed)
        return range(first, max(first, end))

    @property
    def outputs(self) -> int:
        """Rows whose logits are computed."""
        return len(self.scored_rows) + (1 + self.drafted if self.sampled else 0)

    def with_draft(self, draft: Draft, drafted: int) -> "ScheduledSequence":
        """Return the same share with a draft, of which ``drafted`` tokens run."""
        return ScheduledSequence(self.sequence, self.tokens, self.sampled, draft, drafted)


def build_batch(scheduled: SequenceOf[ScheduledSequence]) -> ForwardBatch:
    """Pack a step into one batch.

    Logits are computed, in the order of ``scheduled``, for each sequence's rows that score its
    prompt, for its last token if it samples, and for each of its drafted tokens.
    """
    token_ids, positions, write_slots, kv_slots = [], [], [], []
    query_ends, kv_ends, logit_rows, observed = [0], [0], list[int](), list[int]()
    for entry in scheduled:
        sequence, rows = entry.sequence, entry.rows
        assert sequence.kv is not None
        start = sequence.computed
        end = start + rows
        first = sequence.kv.first
        visible = sequence.kv.slots[: end - first]
        token_ids.append(sequence.uncomputed_tokens(entry.tokens))
        if entry.drafted:
            token_ids.append(entry.draft.tokens[: entry.drafted])
        positions.append(np.arange(start, end, dtype=np.int32) - np.int32(sequence.kv.shift))
        write_slots.append(visible[start - first :])
        kv_slots.append(visible)
        observed += (query_ends[-1] + row for row in observed_rows(entry))
        logit_rows += (query_ends[-1] + row for row in entry.scored_rows)
        query_ends.append(query_ends[-1] + rows)
        kv_ends.append(kv_ends[-1] + end - first)
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
        ragged=_ragged(scheduled),
        observed_rows=np.array(observed, dtype=np.int32),
    )


def observed_rows(entry: ScheduledSequence) -> range:
    """Return which of a sequence's rows in a step have their queries observed."""
    sequence = entry.sequence
    if sequence.compression is None:
        return range(0)
    return sequence.compression.observed_rows(sequence.computed, entry.tokens, entry.drafted)


def _ragged(scheduled: SequenceOf[ScheduledSequence]) -> tuple[RaggedIndex | None, ...]:
    """Return the cells that each sequence sees before its slots; nothing if none sees any."""
    prefixes = [None if one.sequence.kv is None else one.sequence.kv.prefix for one in scheduled]
    if all(prefix is None for prefix in prefixes):
        return ()
    return tuple(None if prefix is None else prefix.index for prefix in prefixes)
