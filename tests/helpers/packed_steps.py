"""Driving a Runner by hand: sequences with scattered slots, packed into steps of any make-up."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner


@dataclass
class Sequence:
    """Tokens of one request, and the slots of those that have been computed, in order.

    ``state`` is the number of its state, in models with states; None takes an empty one.
    """

    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    state: int | None = None

    @property
    def remaining(self) -> int:
        return len(self.tokens) - len(self.slots)


class Stepper:
    """Gives out a runner's slots in a scattered order and runs steps over chosen chunks."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._free = list(range(runner.slots))
        random.Random(0).shuffle(self._free)
        self._states = 0

    def pack(self, chunks: Iterable[tuple[Sequence, int]]) -> ForwardBatch:
        """A batch that computes the next ``count`` tokens of each sequence, all logits wanted."""
        tokens, positions, write, slots, states = [], [], [], [], []
        queries, keys = [0], [0]
        for sequence, count in chunks:
            start = len(sequence.slots)
            new = [self._free.pop() for _ in range(count)]
            sequence.slots += new
            tokens += sequence.tokens[start : start + count]
            positions += range(start, start + count)
            write += new
            slots += sequence.slots
            queries.append(len(tokens))
            keys.append(len(slots))
            states += self._state_of(sequence)
        arrays = (tokens, positions, write, queries, keys, slots, range(len(tokens)))
        return ForwardBatch(
            *(np.array(array, np.int32) for array in arrays), states=np.array(states, np.int32)
        )

    def new_state(self) -> int:
        """Return the number of a state that no sequence has."""
        self._states += 1
        return self._states - 1

    def _state_of(self, sequence: Sequence) -> list[int]:
        if self.runner.states is None:
            return []
        if sequence.state is None:
            sequence.state = self.new_state()
            self.runner.states.clear(sequence.state)
        return [sequence.state]

    def step(self, chunks: Iterable[tuple[Sequence, int]]) -> list[np.ndarray]:
        """Run one step; returns each chunk's logits [count, vocab]."""
        batch = self.pack(chunks)
        logits = self.runner.logits_ops.to_numpy(self.runner.forward(batch)).copy()
        return np.split(logits, batch.query_indptr[1:-1])

    def prefill(self, sequence: Sequence, chunk_sizes: Iterable[int] = ()) -> np.ndarray:
        """Compute all that remains of a sequence, in chunks; the last takes what is left."""
        parts = [self.step([(sequence, size)])[0] for size in chunk_sizes]
        parts += self.step([(sequence, sequence.remaining)])
        return np.concatenate(parts)

    def decode(self, sequences: list[Sequence], logits: list[np.ndarray], count: int) -> None:
        """Append ``count`` greedy tokens to every sequence, one step for all of them a token.

        Args:
            logits: of each sequence's last computed row.
        """
        for _ in range(count):
            for sequence, row in zip(sequences, logits, strict=True):
                sequence.tokens.append(int(row.argmax()))
            logits = [out[-1] for out in self.step([(sequence, 1) for sequence in sequences])]
