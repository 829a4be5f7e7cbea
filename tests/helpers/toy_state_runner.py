"""ToyStateRunner: the toy decoder with a state beside its KV, for engine tests.

Its logits depend on all tokens that a request's state has seen, in order: a state that was not
cleared, that has seen a token twice, or that belongs to other tokens changes the answer.
"""

from dataclasses import replace

import numpy as np
from toy_runner import HIDDEN, ToyRunner

from midfill.arrays import Float64Array
from midfill.models.config import StateSpace
from midfill.runners.forward.batch import ForwardBatch


class ToyStates:
    """Vectors of numbers; NaN until they are cleared. Implements kv.state_pool.StateStore."""

    def __init__(self, count: int) -> None:
        self.values = np.full((count, HIDDEN), np.nan)
        self.copies = 0

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def clear(self, state: int) -> None:
        self.values[state] = 0.0

    def copy(self, source: int, target: int) -> None:
        self.copies += 1
        self.values[target] = self.values[source]


class ToyStateRunner(ToyRunner):
    """A toy runner whose last layer adds a state to the hidden rows, which each row advances."""

    def __init__(self, slots: int, states: int, context: int = 200) -> None:
        super().__init__(slots, context=context)
        last = (self.config.layers - 1,)
        space = StateSpace(layers=last, heads=1, head_dim=HIDDEN, state_dim=1, conv_width=1)
        self.config = replace(self.config, state_space=space)
        self.states = ToyStates(states)

    def _run_layers(
        self, batch: ForwardBatch, hidden: Float64Array, first: int, end: int
    ) -> Float64Array:
        hidden = super()._run_layers(batch, hidden, first, end)
        assert (first, end) == (0, self.config.layers), "a state advances once per row"
        assert len(set(batch.states.tolist())) == len(batch.states) == batch.requests
        for request, state in enumerate(batch.states):
            for row in range(batch.query_indptr[request], batch.query_indptr[request + 1]):
                inputs = self._embed[batch.token_ids[row]]
                self.states.values[state] = np.tanh(0.9 * self.states.values[state] + inputs)
                hidden[row] += self.states.values[state]
        return hidden
