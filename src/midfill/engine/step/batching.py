"""From a plan to scheduled sequences, and from these to one ForwardBatch."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from midfill.arrays import Int32Array
from midfill.engine.scheduling.drafting import NO_DRAFT, Draft
from midfill.engine.scheduling.scheduler import StepPlan
from midfill.engine.sequences.sequence import Sequence
from midfill.methods.sequence_method import SequenceRows
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.layer_rows import LayerRows

_NO_ROWS = range(0)
_NO_NUMBERS: Int32Array = np.zeros(0, np.int32)


class LayerSpan(NamedTuple):
    """Layers first <= i < end.

    Attributes:
        completes: whether ``end`` is the model's number of layers.
    """

    first: int
    end: int
    completes: bool


class ScheduledSequence(NamedTuple):
    """A sequence's share of a step.

    Attributes:
        sequence: holds slots for all rows it runs.
        tokens: how many of its uncomputed tokens run.
        sampled: whether its last token is among them and a next token is sampled.
        draft: proposed next tokens.
        drafted: how many tokens of ``draft`` run after the last token.
        span: the layers that its rows run through; None is all.
    """

    sequence: Sequence
    tokens: int
    sampled: bool
    draft: Draft = NO_DRAFT
    drafted: int = 0
    span: "LayerSpan | None" = None

    @property
    def rows(self) -> int:
        """Tokens that go through the model."""
        return self.tokens + self.drafted

    @property
    def scored_rows(self) -> range:
        """Its rows, counted from its first one, whose logits score the prompt's next token."""
        sequence = self.sequence
        next_scored = sequence.next_scored
        if next_scored is None or not self.completes:
            return _NO_ROWS
        first = max(next_scored - 1 - sequence.computed, 0)
        end = min(self.tokens, sequence.prompt_length - 1 - sequence.computed)
        return range(first, max(first, end))

    @property
    def outputs(self) -> int:
        """Rows whose logits are computed."""
        return len(self.scored_rows) + (1 + self.drafted if self.sampled else 0)

    @property
    def completes(self) -> bool:
        """Whether its rows leave the last layer, so that their KV is computed."""
        return self.span is None or self.span.completes

    def logit_rows(self) -> list[int]:
        """Return the rows whose logits are computed, counted from its first one."""
        sampled = range(self.rows - self.drafted - 1, self.rows) if self.sampled else ()
        return [*self.scored_rows, *sampled]

    def token_ids(self) -> Int32Array:
        """Return the tokens of its rows: [rows] int32."""
        known = self.sequence.uncomputed_tokens(self.tokens)
        if not self.drafted:
            return known
        return np.concatenate((known, self.draft.tokens[: self.drafted]))

    def with_draft(self, draft: Draft, drafted: int) -> "ScheduledSequence":
        """Return the same share with a draft, of which ``drafted`` tokens run."""
        return self._replace(draft=draft, drafted=drafted)


def schedule(
    plan: StepPlan, drafts: Mapping[int, Draft], sequences: Mapping[int, Sequence], layers: int
) -> list[ScheduledSequence]:
    """Return what runs, in the batch's order: decodes, prefills, background chunks.

    Args:
        plan: an applied plan, so that sequences hold the slots of what they run.
        drafts: those that were proposed, by sequence id.
        sequences: the engine's, by id; those that begin to prefill by layers get ``layer_rows``.
        layers: of the model.
    """
    scheduled = [ScheduledSequence(sequences[sequence_id], 1, True) for sequence_id in plan.decodes]
    for entry in scheduled:
        if not entry.sequence.method.is_null:
            rows = _layer_rows(entry)
            entry.sequence.layer_rows = None if rows.changes is None else rows
    for sequence_id, tokens in (*plan.chunks, *plan.admit, *plan.background):
        if tokens:
            scheduled.append(_next_tokens(sequences[sequence_id], tokens))
    for chunk in plan.layer_chunks:
        sequence = sequences[chunk.sequence_id]
        span = LayerSpan(chunk.first, chunk.end, chunk.end == layers)
        entry = _next_tokens(sequence, chunk.tokens)._replace(span=span)
        if sequence.layer_rows is None:
            sequence.layer_rows = _layer_rows(entry)
        scheduled.append(entry._replace(sampled=entry.sampled and span.completes))
    if drafts:
        drafted = dict(plan.drafts)
        for place, entry in enumerate(scheduled):
            sequence_id = entry.sequence.sequence_id
            if sequence_id in drafts:
                draft = drafts[sequence_id]
                scheduled[place] = entry.with_draft(draft, drafted.get(sequence_id, 0))
    return scheduled


def _layer_rows(entry: ScheduledSequence) -> LayerRows:
    """Return what a sequence runs, before the first layer."""
    sequence = entry.sequence
    rows = LayerRows(sequence.computed, entry.token_ids().copy())
    rows.changes = sequence.method.row_changes(sequence, rows)
    return rows


def _next_tokens(sequence: Sequence, tokens: int) -> ScheduledSequence:
    """Return at most ``tokens`` of what a sequence has to compute, up to its barrier.

    Indivisible chunks run whole, even beyond ``tokens``.
    """
    remaining = sequence.length - sequence.computed
    allowed = min(tokens, remaining, sequence.barrier - sequence.computed)
    allowed = max(allowed, sequence.method.atomic_tokens(sequence.computed))
    return ScheduledSequence(sequence, allowed, allowed == remaining and not sequence.background)


class BatchRows(NamedTuple):
    """One request's share of a ForwardBatch, whose attributes are described there.

    Attributes:
        token_ids, positions, write_slots: [rows] int32.
        kv_slots: [n] int32.
        visible_slots: [rows] int32; None where the rows are those of the last slots.
        logit_rows, observed_rows: counted from its first row.
        plan: what it attends to beside its slots, or which keys; None if there is nothing to say.
        state: number of its state; None in models without.
    """

    token_ids: Int32Array
    positions: Int32Array
    write_slots: Int32Array
    kv_slots: Int32Array
    visible_slots: Int32Array | None
    logit_rows: Iterable[int]
    observed_rows: Iterable[int]
    plan: AttentionPlan | None = None
    state: int | None = None


def build_batch(scheduled: SequenceOf[ScheduledSequence]) -> ForwardBatch:
    """Pack a step into one batch.

    Logits are computed, in the order of ``scheduled``, for each sequence's rows that score its
    prompt, for its last token if it samples, and for each of its drafted tokens.
    """
    if all(map(_is_plain_decode, scheduled)):
        return _decode_batch(scheduled)
    return pack([_rows_of(entry) for entry in scheduled])


def _is_plain_decode(entry: ScheduledSequence) -> bool:
    """Whether a sequence runs one token, which attends to all that come before it."""
    sequence, kv = entry.sequence, entry.sequence.kv
    return (
        sequence.decoding
        and not entry.drafted
        and entry.span is None
        and sequence.method.is_null
        and kv is not None
        and kv.prefix is None
    )


def _decode_batch(scheduled: SequenceOf[ScheduledSequence]) -> ForwardBatch:
    """Return what ``pack`` would, for plain decodes only.

    Most steps are such, and next to a small model's step of some milliseconds, the time that this
    saves for each row matters.
    """
    rows = len(scheduled)
    sequences = [entry.sequence for entry in scheduled]
    positions = [sequence.computed for sequence in sequences]
    kv_indptr = np.array([0, *accumulate(position + 1 for position in positions)], np.int32)
    slots = [
        sequence.kv.slots[: position + 1]
        for sequence, position in zip(sequences, positions, strict=True)
        if sequence.kv is not None
    ]
    kv_slots = np.concatenate(slots) if rows > 1 else slots[0].copy()
    every_row = np.arange(rows + 1, dtype=np.int32)
    return ForwardBatch(
        token_ids=np.array(
            [sequence.token_at(sequence.computed) for sequence in sequences], np.int32
        ),
        positions=np.array(positions, np.int32),
        write_slots=kv_slots[kv_indptr[1:] - 1],
        query_indptr=every_row,
        kv_indptr=kv_indptr,
        kv_slots=kv_slots,
        logit_rows=every_row[:-1],
        observed_rows=_NO_NUMBERS,
        visible_slots=_NO_NUMBERS,
        states=_states([sequence.held.state for sequence in sequences]),
    )


def pack(parts: SequenceOf[BatchRows]) -> ForwardBatch:
    """Pack the shares of some requests into one batch, in their order."""
    query_ends, kv_ends, logit_rows, observed = [0], [0], list[int](), list[int]()
    for part in parts:
        start = query_ends[-1]
        logit_rows += (start + row for row in part.logit_rows)
        observed += (start + row for row in part.observed_rows)
        query_ends.append(start + len(part.token_ids))
        kv_ends.append(kv_ends[-1] + len(part.kv_slots))
    batch = ForwardBatch(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        write_slots=np.concatenate([part.write_slots for part in parts]),
        query_indptr=np.array(query_ends, dtype=np.int32),
        kv_indptr=np.array(kv_ends, dtype=np.int32),
        kv_slots=np.concatenate([part.kv_slots for part in parts]),
        logit_rows=np.array(logit_rows, dtype=np.int32),
        observed_rows=np.array(observed, dtype=np.int32),
        attention=_plans(parts),
        states=_states([part.state for part in parts]),
    )
    if all(part.visible_slots is None for part in parts):
        return batch
    seen = np.split(batch.slots_seen(), query_ends[1:-1])
    for place, part in enumerate(parts):
        if part.visible_slots is not None:
            seen[place] = part.visible_slots
    return replace(batch, visible_slots=np.concatenate(seen))


def _rows_of(entry: ScheduledSequence) -> BatchRows:
    """Return the rows that a sequence runs through all layers."""
    sequence, kv = entry.sequence, entry.sequence.held
    start, end = sequence.computed, sequence.computed + entry.rows
    positions = np.arange(start, end, dtype=np.int32)
    plan = None if kv.prefix is None else AttentionPlan(kv.prefix.index)
    rows = SequenceRows(positions, kv.slots[: end - kv.first], None, plan)
    rows = sequence.method.arrange(sequence, start, end, rows)
    return BatchRows(
        token_ids=entry.token_ids(),
        positions=rows.positions,
        write_slots=kv.slots[start - kv.first : end - kv.first],
        kv_slots=rows.kv_slots,
        visible_slots=rows.visible,
        logit_rows=entry.logit_rows(),
        observed_rows=observed_rows(entry),
        plan=rows.plan,
        state=kv.state,
    )


def layer_batch_rows(entry: ScheduledSequence, rows: LayerRows) -> BatchRows:
    """Return the rows that a sequence runs through some layers."""
    sequence, kv = entry.sequence, entry.sequence.held
    in_order = rows.keys is None and int(rows.numbers[-1]) - int(rows.numbers[0]) < len(rows)
    slots = kv.slots if rows.slots is None else rows.slots
    if rows.keys is None:
        kv_slots = slots[: int(rows.numbers[-1]) + 1 - kv.first]
        visible = rows.numbers - np.int32(kv.first - 1)
    else:
        kv_slots = slots[rows.keys - kv.first]
        visible = np.searchsorted(rows.keys, rows.numbers, side="right").astype(np.int32)
    plan = None if kv.prefix is None else AttentionPlan(kv.prefix.index)
    arranged = SequenceRows(rows.numbers, kv_slots, None if in_order else visible, plan)
    if rows.keys is None:  # a method that has dropped keys says by itself what rows see
        end = int(rows.numbers[-1]) + 1
        arranged = sequence.method.arrange(sequence, rows.first, end, arranged)
    wanted = np.array([*entry.logit_rows(), *observed_rows(entry)], np.int32)
    places = rows.places(wanted + np.int32(sequence.computed)).tolist()
    logits = len(places) - len(observed_rows(entry))
    return BatchRows(
        token_ids=rows.token_ids,
        positions=arranged.positions,
        write_slots=slots[rows.numbers - kv.first],
        kv_slots=arranged.kv_slots,
        visible_slots=arranged.visible,
        logit_rows=places[:logits],
        observed_rows=places[logits:],
        plan=arranged.plan,
        state=kv.state,
    )


def observed_rows(entry: ScheduledSequence) -> range:
    """Return which of a sequence's rows in a step have their queries observed."""
    return entry.sequence.method.observed_rows(entry.sequence, entry.tokens, entry.drafted)


def _states(numbers: SequenceOf[int | None]) -> Int32Array:
    """Return each request's state; nothing in models without."""
    return np.array([number for number in numbers if number is not None], np.int32)


def _plans(parts: SequenceOf[BatchRows]) -> tuple[AttentionPlan | None, ...]:
    """Return each request's plan; nothing if none has any."""
    plans = tuple(part.plan for part in parts)
    return () if all(plan is None for plan in plans) else plans
