"""LayerRows: rows of one sequence on their way through the layers.

A prompt that is prefilled by layers runs its rows through some layers in one step and through the
next ones in a later step; in between, their hidden states are here. The sequence owns them
(``Sequence.layer_rows``) and forgets them with its KV: when it is preempted, cancelled or fails.

Not all rows have to reach the last layer. A method that drops rows between two layers, or has some
join, implements ``RowChanges``: the pass stops before the layers it names, and it calls ``take``
and ``add``. ``keys`` says which tokens the rows attend to from there on.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array, RunnerArray


class LayerRows:
    """Hidden rows of a sequence, between two layers.

    Attributes:
        first, end: the pass computes KV of the tokens first <= i < end.
        numbers: [rows] int32, ascending: which tokens the rows are.
        token_ids: [rows] int32.
        hidden: [rows, hidden], as the layer before left it; None before the first layer.
        next_layer: number of layers that the rows have gone through.
        keys: [n] int32, ascending: the tokens that rows attend to, each to those up to its own;
            None is all from the sequence's first to ``end``.
        slots: [end] int32, where the KV of the first ``end`` tokens is in the next layer, as
            ``ForwardBatch.kv_slots`` says it; None is in the sequence's slots.
        changes: drops rows and has rows join; None runs all rows through all layers.
        queries: float32 [layers, n, query_heads, head_dim], the rotated queries of the rows that
            are observed, filled layer by layer; None where none is.
    """

    __slots__ = (
        "changes",
        "end",
        "first",
        "hidden",
        "keys",
        "next_layer",
        "numbers",
        "queries",
        "slots",
        "token_ids",
    )

    def __init__(
        self, first: int, token_ids: Int32Array, changes: "RowChanges | None" = None
    ) -> None:
        """Start with rows of consecutive tokens, before the first layer.

        Args:
            first: number of the first token.
            token_ids: [rows] int32.
            changes: see the class.
        """
        self.first = first
        self.end = first + len(token_ids)
        self.numbers: Int32Array = np.arange(self.first, self.end, dtype=np.int32)
        self.token_ids = token_ids
        self.hidden: RunnerArray | None = None
        self.next_layer = 0
        self.keys: Int32Array | None = None
        self.slots: Int32Array | None = None
        self.changes = changes
        self.queries: Float32Array | None = None

    def __len__(self) -> int:
        """Number of rows that go on."""
        return len(self.numbers)

    @property
    def tokens(self) -> int:
        """Number of tokens whose KV the pass computes."""
        return self.end - self.first

    def places(self, numbers: Int32Array) -> Int64Array:
        """Return the rows of some tokens, all of which have one: [n] int64."""
        return np.searchsorted(self.numbers, numbers)

    def take(self, rows: Int64Array) -> None:
        """Let only some rows go on.

        Args:
            rows: [n] int64, ascending, at least one.
        """
        self.numbers, self.token_ids = self.numbers[rows], self.token_ids[rows]
        if self.hidden is not None:
            self.hidden = self.hidden[rows]

    def add(
        self,
        numbers: Int32Array,
        token_ids: Int32Array,
        hidden: RunnerArray,
        join: Callable[[Sequence[RunnerArray]], RunnerArray],
    ) -> None:
        """Have rows join, before the next layer.

        Args:
            numbers: [n] int32, which tokens they are; none has a row.
            token_ids: [n] int32.
            hidden: [n, hidden], as the layer before left it.
            join: the runner's, see ``Runner.join``.
        """
        assert self.hidden is not None
        joined = np.concatenate((self.numbers, numbers))
        order = np.argsort(joined, kind="stable")
        self.numbers = joined[order]
        self.token_ids = np.concatenate((self.token_ids, token_ids))[order]
        self.hidden = join((self.hidden, hidden))[order]

    def keep_queries(self, first_layer: int, layers: int, queries: Float32Array) -> None:
        """Keep the observed rows' queries of some layers.

        Args:
            first_layer: the first of them.
            layers: of the model.
            queries: float32 [some layers, n, query_heads, head_dim].
        """
        if self.queries is None:
            self.queries = np.zeros((layers, *queries.shape[1:]), np.float32)
        self.queries[first_layer : first_layer + len(queries)] = queries


class RowChanges(Protocol):
    """Changes which rows go on, which keys they see and where these are, between layers."""

    @property
    def stops(self) -> tuple[int, ...]:
        """The layers before which ``change`` is called, ascending; the model's number of layers
        stands for the end of the pass."""

    def change(self, rows: LayerRows) -> None:
        """Change rows that stand before layer ``rows.next_layer``.

        Args:
            rows: what goes on; the row of the last token must stay.
        """
