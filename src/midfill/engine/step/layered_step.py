"""One step's forward pass, whole or in parts.

Usually a step is one call for all layers. Where some sequences run through a part of the layers
only (``ScheduledSequence.span``), or change their rows between two layers (``RowChanges``), it is
cut at these layers. Each part runs the rows that are there: decodes through all layers, so each has
its token in every step, and a prompt that is prefilled by layers through its own.

A step that may be given up is cut, too: between two parts it is asked whether it goes on.

On the CPU kernels, logits have the same bits however a step is cut.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from midfill.arrays import Float32Array, RunnerArray
from midfill.engine.step.batching import (
    BatchRows,
    ScheduledSequence,
    build_batch,
    layer_batch_rows,
    observed_rows,
    pack,
)
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.layer_rows import LayerRows
from midfill.runners.forward.runner import Runner

_LOOKS = 6  # parts of a step that may be given up


class StepOutputs(NamedTuple):
    """What a step computes.

    Attributes:
        logits: [outputs, vocab] float32, in the order of ``build_batch``; () if there are none.
        queries: float32 [layers, n, query_heads, head_dim] per scheduled sequence, the queries of
            its observed rows; None where there are none, or not yet those of all layers.
    """

    logits: RunnerArray
    queries: list[Float32Array | None]


def run_step(runner: Runner, scheduled: SequenceOf[ScheduledSequence]) -> StepOutputs:
    """Run a step's forward pass.

    Args:
        runner: the model.
        scheduled: what runs; sequences that have ``layer_rows`` continue with these.
    """
    if all(entry.sequence.layer_rows is None for entry in scheduled):
        batch = build_batch(scheduled)
        logits = runner.forward(batch)
        return StepOutputs(logits, _observed(runner, batch, scheduled, 0, runner.config.layers))
    return _run_in_parts(runner, scheduled)


def run_interruptible_step(
    runner: Runner, scheduled: SequenceOf[ScheduledSequence], interrupted: Callable[[], bool]
) -> StepOutputs | None:
    """Run a step's forward pass unless it is interrupted between two layers; None if it was.

    Args:
        runner: the model.
        scheduled: what runs, without ``layer_rows``.
        interrupted: asked a few times whether to give the step up.
    """
    batch, layers = build_batch(scheduled), runner.config.layers
    hidden = runner.embed(batch)
    size = -(-layers // _LOOKS)
    for first in range(0, layers, size):
        if first and interrupted():
            return None
        hidden = runner.run_layers(batch, hidden, first, min(first + size, layers))
    queries = _observed(runner, batch, scheduled, 0, layers)
    return StepOutputs(runner.compute_logits(batch, hidden), queries)


def _observed(
    runner: Runner,
    batch: ForwardBatch,
    scheduled: SequenceOf[ScheduledSequence],
    first: int,
    end: int,
) -> list[Float32Array | None]:
    """Return the queries that a batch's rows left in some layers, per sequence."""
    if not len(batch.observed_rows):
        return [None] * len(scheduled)
    counts = [len(observed_rows(entry)) for entry in scheduled]
    queries = runner.observed_queries(batch, first, end)
    ends = np.cumsum(counts)
    return [
        queries[:, end - count : end] if count else None
        for count, end in zip(counts, ends, strict=True)
    ]


@dataclass(eq=False)
class _Share:
    """A sequence's part of the step.

    Attributes:
        entry: what is scheduled.
        rows: where its rows are now.
        end: the layer that they stop before.
        part: the rows as a batch takes them; made anew when they change.
    """

    entry: ScheduledSequence
    rows: LayerRows
    end: int
    part: BatchRows | None = None

    def stops_before(self, layer: int) -> bool:
        """Whether its rows may change before a layer."""
        return self.rows.changes is not None and layer in self.rows.changes.stops

    def change(self) -> None:
        """Let its rows change."""
        assert self.rows.changes is not None
        self.rows.changes.change(self.rows)
        self.part = None

    def batch_rows(self) -> BatchRows:
        """Return its rows as a batch takes them."""
        if self.part is None:
            self.part = layer_batch_rows(self.entry, self.rows)
        return self.part


def _run_in_parts(runner: Runner, scheduled: SequenceOf[ScheduledSequence]) -> StepOutputs:
    """Run a step in as many parts as its sequences need."""
    layers = runner.config.layers
    shares = [_share(entry, layers) for entry in scheduled]
    current: list[_Share] = []
    hidden: RunnerArray = None
    for first, end in pairwise(_cuts(shares, layers)):
        active = [share for share in shares if share.rows.next_layer == first and share.end > first]
        changed = [share for share in active if share.stops_before(first)]
        for share in changed:
            share.change()
        if not active:
            continue
        batch = pack([share.batch_rows() for share in active])
        if first == 0:
            hidden = runner.embed(batch)
        elif changed or active != current:
            hidden = _joined(runner, active)
        hidden = runner.run_layers(batch, hidden, first, end)
        _hand_out(runner, batch, active, hidden, first, end)
        current = active
    done = [share for share in shares if share.entry.completes]
    for share in done:
        if share.stops_before(layers):
            share.change()
    queries = [share.rows.queries if share.entry.completes else None for share in shares]
    if not any(share.entry.outputs for share in done):
        return StepOutputs((), queries)
    batch = pack([share.batch_rows() for share in done])
    logits = runner.compute_logits(batch, _joined(runner, done))
    return StepOutputs(logits, queries)


def _share(entry: ScheduledSequence, layers: int) -> _Share:
    rows = entry.sequence.layer_rows
    if rows is None:
        rows = LayerRows(entry.sequence.computed, entry.token_ids())
    return _Share(entry, rows, layers if entry.span is None else entry.span.end)


def _cuts(shares: SequenceOf[_Share], layers: int) -> list[int]:
    """Return the layers that the step is cut at, ascending, its ends included."""

    def wanted() -> Iterator[int]:
        for share in shares:
            yield from (share.rows.next_layer, share.end)
            if share.rows.changes is not None:
                inside = share.rows.changes.stops
                yield from (stop for stop in inside if share.rows.next_layer < stop < share.end)

    return sorted(set(wanted()))


def _joined(runner: Runner, shares: SequenceOf[_Share]) -> RunnerArray:
    """Return the hidden rows of some sequences, one below the other."""
    parts = [share.rows.hidden for share in shares if share.rows.hidden is not None]
    assert len(parts) == len(shares)
    return parts[0] if len(parts) == 1 else runner.join(parts)


def _hand_out(
    runner: Runner,
    batch: ForwardBatch,
    active: SequenceOf[_Share],
    hidden: RunnerArray,
    first: int,
    end: int,
) -> None:
    """Give each sequence its hidden rows, and the queries that were observed in these layers."""
    observed = _observed(runner, batch, [share.entry for share in active], first, end)
    ends = pairwise(batch.query_indptr.tolist())
    for share, (start, stop), queries in zip(active, ends, observed, strict=True):
        share.rows.hidden = hidden[start:stop]
        share.rows.next_layer = end
        if queries is not None:
            share.rows.keep_queries(first, runner.config.layers, queries)
