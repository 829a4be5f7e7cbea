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
import torch

from midfill.arrays import BoolArray, Float32Array, Int32Array
from midfill.engine.sampling.sampler import one_thread
from midfill.kv.ragged import cells_of_slots
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.window_attention import received_attention
from midfill.methods.rows.method import PruningMethod
from midfill.runners.forward.layer_rows import LayerRows
from midfill.runners.forward.runner import Runner


class RowPruning:
    """Implements ``layer_rows.RowChanges``.

    Attributes:
        method: decides which tokens go on.
        frontier: [tokens] int32, how many layers have each token's KV.
    """

    def __init__(
        self, method: PruningMethod, runner: Runner, prompt_length: int, max_length: int
    ) -> None:
        """Begin with a sequence of which nothing is computed.

        Args:
            method: decides which tokens go on.
            runner: holds the KV.
            prompt_length: tokens of the prompt.
            max_length: maximum tokens of the sequence.
        """
        self.method = method
        self._runner = runner
        self._prompt = prompt_length
        self._after = method.pruning_layers(runner.config)
        self._stops = tuple(sorted({*(layer + 1 for layer in self._after), runner.config.layers}))
        self.frontier: Int32Array = np.zeros(max_length, np.int32)
        self._aside: torch.Tensor | None = None
        self._slots: Int32Array = np.zeros(0, np.int32)
        self._fixed = False

    @property
    def stops(self) -> tuple[int, ...]:
        """See ``RowChanges.stops``."""
        return self._stops

    @property
    def put_aside(self) -> int:
        """Number of tokens whose hidden rows are kept, since some layers lack their KV."""
        frontier = self.frontier
        return int(np.count_nonzero((frontier > 0) & (frontier < self._runner.config.layers)))

    def restart(self) -> None:
        """Begin again, since the sequence holds no KV any more."""
        self.frontier[:] = 0
        self._aside = None

    def begin(self, slots: Int32Array, *, fixed: bool) -> None:
        """Prepare for a pass.

        Args:
            slots: [n] int32, those of all tokens up to the last one that runs.
            fixed: whether nothing is dropped or revived.
        """
        self._slots, self._fixed = slots, fixed

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
        with one_thread():
            total = sum(received_attention(keys, queries, head) for head in range(config.kv_heads))
        mean: Float32Array = np.asarray(total) / (config.query_heads * queries.shape[1])
        return mean

    def _put_aside(self, rows: LayerRows, kept: Int32Array, layer: int) -> None:
        """Keep the hidden rows of tokens that stop here."""
        goes_on = np.isin(rows.numbers, kept)
        if goes_on.all():
            return
        assert rows.hidden is not None
        if self._aside is None:
            self._aside = rows.hidden.new_empty(self._prompt, rows.hidden.shape[1])
        gone = rows.numbers[~goes_on]
        self.frontier[gone] = layer
        places, leaving = (torch.from_numpy(one) for one in (gone, np.flatnonzero(~goes_on)))
        with one_thread():
            device = rows.hidden.device
            self._aside[places.long().to(device)] = rows.hidden[leaving.to(device)]
            rows.take(np.flatnonzero(goes_on))

    def _revive(self, rows: LayerRows, kept: Int32Array, layer: int) -> None:
        """Have chosen tokens go on that were put aside here before."""
        missing = kept[(self.frontier[kept] <= layer) & ~np.isin(kept, rows.numbers)]
        if not len(missing):
            return
        assert self._aside is not None
        places = torch.from_numpy(missing).long().to(self._aside.device)
        with one_thread():
            rows.add(missing, np.zeros_like(missing), self._aside[places])
