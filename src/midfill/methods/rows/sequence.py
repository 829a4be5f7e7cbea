"""RowPruning: a method that drops rows between layers, at work on one sequence.

The prompt's rows run through the layers as a whole. After a pruning layer, the method sees how much
the last rows attend to each active token, and keeps some; the others' hidden rows are put aside as
they are (the auxiliary cache), and the layers above have no KV of them. A token's *frontier* is the
first layer that lacks its KV.

Each later token begins with all tokens active, since all have their KV up to the first pruning
layer. If the method revives, its own attention chooses anew there; chosen tokens whose KV is
missing run on with it from where they were put aside. Otherwise it sees what KV there is. A token
that is chosen after a pruning layer has its frontier there or above, so its hidden row is the input
of just the layer that comes next, and no token is computed twice in a layer.

Rows that the check for an empty answer runs are taken back, so they revive nothing.
"""

from dataclasses import replace

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array, RunnerArray
from midfill.errors import InvalidRequestError
from midfill.kv.ragged import cells_of_slots
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.window_attention import received_attention
from midfill.methods.rows.method import PruningMethod
from midfill.methods.sequence_method import (
    Aspect,
    PlainLengths,
    Prefill,
    RequestFacts,
    SequenceMethod,
    SequenceView,
)
from midfill.runners.forward.layer_rows import LayerRows, RowChanges
from midfill.runners.forward.runner import Runner


class RowPruning(SequenceMethod):
    """Implements ``layer_rows.RowChanges`` as well.

    Attributes:
        method: decides which tokens go on.
        frontier: [tokens] int32, how many layers have each token's KV.
    """

    title = "the method that drops rows"
    changes = frozenset({Aspect.ROWS, Aspect.CHUNKS})

    def __init__(
        self, name: str, method: PruningMethod, runner: Runner, sequence: SequenceView
    ) -> None:
        """Begin with a sequence of which nothing is computed.

        Args:
            name: how requests name the method.
            method: decides which tokens go on.
            runner: holds the KV.
            sequence: the sequence.
        """
        self.name = name
        self.method = method
        self._runner = runner
        self._prompt = sequence.prompt_length
        self._after = method.pruning_layers(runner.config)
        self._stops = tuple(sorted({*(layer + 1 for layer in self._after), runner.config.layers}))
        self.frontier: Int32Array = np.zeros(sequence.max_length, np.int32)
        self._aside: RunnerArray | None = None
        self._slots: Int32Array = np.zeros(0, np.int32)
        self._fixed = False

    @property
    def is_private(self) -> bool:
        """See ``SequenceMethod``: layers lack tokens."""
        return True

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        """See ``SequenceMethod``: all tokens run, so an answer doesn't depend on the cache."""
        return 0

    def prefill(self, sequence: SequenceView) -> Prefill:
        """See ``SequenceMethod``."""
        return "layers"

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``: the prompt runs as a whole, then each token by itself."""
        return max(sequence.computed + 1, sequence.prompt_length)

    def allows_draft(self, tokens: int) -> bool:
        """See ``SequenceMethod``: each token chooses anew what it attends to."""
        return False

    def row_changes(self, sequence: SequenceView, rows: LayerRows) -> RowChanges:
        """See ``SequenceMethod``."""
        assert sequence.kv is not None
        self._slots = sequence.kv.slots[: rows.end].copy()
        decodes = rows.first >= sequence.prompt_length
        checked = rows.first < sequence.prompt_length + sequence.checked_tokens
        self._fixed = decodes and (checked or sequence.may_be_empty)
        return self

    def observed_rows(self, sequence: SequenceView, tokens: int, drafted: int) -> range:
        """See ``SequenceMethod``: those that score the others."""
        rows = tokens + drafted
        return range(max(rows - self.method.scoring_rows, 0), rows)

    @property
    def stops(self) -> tuple[int, ...]:
        """See ``RowChanges.stops``."""
        return self._stops

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        self.frontier[:] = 0
        self._aside = None

    def change(self, rows: LayerRows) -> None:
        """See ``RowChanges.change``."""
        layer = rows.next_layer
        if layer == self._runner.config.layers:
            self.frontier[rows.numbers] = layer
            return
        last = int(rows.numbers[-1])
        active = np.arange(last + 1, dtype=np.int32) if rows.keys is None else rows.keys
        decodes = last >= self._prompt
        if self._fixed or (decodes and not self.method.revives):
            rows.keys = active[(self.frontier[active] > layer) | np.isin(active, rows.numbers)]
            return
        kept = active[self._goes_on(rows, active)]
        self._put_aside(rows, kept, layer)
        self._revive(rows, kept, layer)
        rows.keys = kept

    def _goes_on(self, rows: LayerRows, active: Int32Array) -> BoolArray:
        """Return which active tokens go on; those of the answer and the scoring rows always do."""
        layer = rows.next_layer - 1
        prunable = active < self._prompt
        scores = self._scores(rows, active, layer)[prunable]
        chosen = self.method.select(self._after.index(layer), scores, self._prompt)
        goes_on = ~prunable
        goes_on[np.flatnonzero(prunable)[chosen]] = True
        goes_on[active > rows.numbers[-1] - self.method.scoring_rows] = True
        return goes_on

    def _scores(self, rows: LayerRows, active: Int32Array, layer: int) -> Float32Array:
        """Return the mean attention of the scoring rows to each active token: float32 [n]."""
        assert rows.queries is not None
        queries = rows.queries[layer : layer + 1]
        config = replace(self._runner.config, layers=1)
        cells = cells_of_slots(self._slots[active], config.kv_heads, self._runner.slots)
        cells += np.int32(layer * config.kv_heads * self._runner.slots)
        keys = SequenceKeys(config, list(cells), self._runner.cells)
        total = sum(received_attention(keys, queries, head) for head in range(config.kv_heads))
        mean: Float32Array = np.asarray(total) / (config.query_heads * queries.shape[1])
        return mean

    def _put_aside(self, rows: LayerRows, kept: Int32Array, layer: int) -> None:
        """Keep the hidden rows of tokens that stop here."""
        goes_on = np.isin(rows.numbers, kept)
        if goes_on.all():
            return
        assert rows.hidden is not None
        if self._aside is None:  # all rows of the prompt are here
            self._aside = rows.hidden[np.arange(self._prompt)]
        gone = rows.numbers[~goes_on]
        self.frontier[gone] = layer
        self._aside[gone.astype(np.int64)] = rows.hidden[np.flatnonzero(~goes_on)]
        rows.take(np.flatnonzero(goes_on))

    def _revive(self, rows: LayerRows, kept: Int32Array, layer: int) -> None:
        """Have chosen tokens go on that were put aside here before."""
        missing = kept[(self.frontier[kept] <= layer) & ~np.isin(kept, rows.numbers)]
        if not len(missing):
            return
        assert self._aside is not None
        hidden = self._aside[missing.astype(np.int64)]
        rows.add(missing, np.zeros_like(missing), hidden, self._runner.join)


class PruningKind(PlainLengths):
    """Puts methods to work that drop rows between layers."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``."""
        if not isinstance(method, PruningMethod):
            return None
        if request.answers > 1:
            raise InvalidRequestError(
                "a method that drops rows of the prompt takes n = 1: each answer revives its own",
                param="n",
            )
        if request.scores_prompt:
            raise InvalidRequestError(
                "a method that drops rows of the prompt leaves no log probabilities of its tokens",
                param="prompt_logprobs",
            )
        return RowPruning(name, method, self._runner, sequence)
