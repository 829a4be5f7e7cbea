"""ForwardBatch: the input of one forward pass."""

from dataclasses import dataclass, field

import numpy as np

from midfill.arrays import Float64Array, Int32Array
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import AttentionPlan


def _no_rows() -> Int32Array:
    return np.zeros(0, np.int32)


@dataclass(frozen=True)
class ForwardBatch:
    """Rows (tokens) of many requests in one packed batch, decodes and prefill chunks alike.

    Request b has the rows ``query_indptr[b]:query_indptr[b + 1]`` and attends to the KV in
    ``kv_slots[kv_indptr[b]:kv_indptr[b + 1]]``, which is in order of position and ends with the
    slots of its own new rows. Row i of its q rows (i from 0) attends to the first
    ``kv_length - q + i + 1`` of them. Where rows don't follow one another, or others have KV after
    them, ``visible_slots`` says how many. ``attention[b]`` says what it attends to beside these.

    A slot is the same in all layers, usually. A batch that runs through a single layer may also
    name the cells that a slot has for another: ``slot + n * kv_heads * slots of the cache`` is the
    slot n layers on, and n may be negative (``kv.places``).

    Attributes:
        token_ids: [rows] int32.
        positions: [rows] int32, for the rotary embedding.
        write_slots: [rows] int32, the slot that each row's K and V are written to.
        query_indptr: [requests + 1] int32, ascending from 0 to the number of rows.
        kv_indptr: [requests + 1] int32, ascending from 0 to the length of ``kv_slots``.
        kv_slots: [sum of KV lengths] int32.
        logit_rows: [outputs] int32, ascending, the rows whose logits are computed.
        observed_rows: [n] int32, rows whose queries are kept for ``Runner.observed_queries``.
        visible_slots: [rows] int32, how many of its request's slots each row attends to, its own
            the last of them; ascending within a request. Empty where all rows are as above.
        states: [requests] int32, for models with states: the one that each request's rows begin
            with and advance (``Runner.states``). Empty for other models.
        attention: one per request, what it attends to beside its slots, or which keys; None where
            there is nothing to say. Empty if that is so for all.
    """

    token_ids: Int32Array
    positions: Int32Array
    write_slots: Int32Array
    query_indptr: Int32Array
    kv_indptr: Int32Array
    kv_slots: Int32Array
    logit_rows: Int32Array
    observed_rows: Int32Array = field(default_factory=_no_rows)
    visible_slots: Int32Array = field(default_factory=_no_rows)
    states: Int32Array = field(default_factory=_no_rows)
    attention: tuple[AttentionPlan | None, ...] = ()

    @property
    def rows(self) -> int:
        """Number of tokens that go through the model."""
        return len(self.token_ids)

    @property
    def requests(self) -> int:
        """Number of requests that the rows belong to."""
        return len(self.query_indptr) - 1

    def plans(self) -> list[tuple[int, AttentionPlan]]:
        """Return the requests that have a plan, with it."""
        return [(number, plan) for number, plan in enumerate(self.attention) if plan is not None]

    def check_plans(self, config: ModelConfig) -> None:
        """Check that all plans fit a model and their requests' rows.

        Raises:
            ValueError: one doesn't; names the request and its part, counted from 0.
        """
        for number, plan in self.plans():
            rows = int(self.query_indptr[number + 1] - self.query_indptr[number])
            try:
                plan.check(config, rows)
            except ValueError as error:
                raise ValueError(f"request {number}, {error}") from None

    def check_states(self, config: ModelConfig) -> None:
        """Check that each request has a state of its own, if the model has states.

        Raises:
            ValueError: one hasn't.
        """
        if config.state_space is not None and len(set(self.states.tolist())) != self.requests:
            raise ValueError(
                f"{self.requests} requests need as many states, not {self.states.tolist()}"
            )

    def only_outputs(self) -> "ForwardBatch":
        """Return the rows whose logits are wanted as a batch, without requests that have none.

        The batch must have no plans and no observed rows.
        """
        rows, ends = self.logit_rows, self.kv_indptr
        owners = np.searchsorted(self.query_indptr, rows, side="right") - 1
        kept, counts = np.unique(owners, return_counts=True)
        lengths = np.diff(ends)[kept]
        slots = [self.kv_slots[ends[owner] : ends[owner + 1]] for owner in kept.tolist()]
        return ForwardBatch(
            self.token_ids[rows],
            self.positions[rows],
            self.write_slots[rows],
            np.array([0, *np.cumsum(counts)], np.int32),
            np.array([0, *np.cumsum(lengths)], np.int32),
            np.concatenate([_no_rows(), *slots]),
            np.arange(len(rows), dtype=np.int32),
            visible_slots=self.slots_seen()[rows],
            states=self.states[kept] if len(self.states) else _no_rows(),
        )

    def needs_only_outputs(self, config: ModelConfig) -> bool:
        """Return whether some rows are needed for the KV alone that they leave.

        They may stop before the last layers of a model, if these keep none.
        """
        return (
            config.kv_sharing_layers > 0
            and len(self.logit_rows) < self.rows
            and not len(self.observed_rows)
            and all(plan.is_dense for _, plan in self.plans())
        )

    def keys_seen(self) -> Float64Array:
        """Return how many keys each row attends to, or may choose among: [rows] float64.

        Keys of cells are those of a head in the mean.
        """
        seen = self.slots_seen().astype(np.float64)
        for number, plan in self.plans():
            rows = slice(*self.query_indptr[number : number + 2])
            for cells in (plan.cells, *(part.cells for part in plan.parts)):
                if cells is not None:
                    seen[rows] += len(cells.cells) / (len(cells.indptr) - 1)
            for part in plan.parts:
                seen[rows] += len(part.slots) if part.visible is None else part.visible
        return seen

    def slots_seen(self) -> Int32Array:
        """Return how many of its request's slots each row attends to: [rows] int32."""
        if len(self.visible_slots):
            return self.visible_slots
        queries, lengths = np.diff(self.query_indptr), np.diff(self.kv_indptr)
        before = np.repeat(lengths - queries - self.query_indptr[:-1], queries)
        seen: Int32Array = (before + np.arange(1, self.rows + 1)).astype(np.int32)
        return seen
