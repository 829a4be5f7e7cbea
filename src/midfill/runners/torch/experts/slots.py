"""LayerSlots: which of a layer's experts the device holds, and which of them goes first.

HybriMoE's section 4.3: what the router thinks of an expert tells more about the next tokens than
whether it was chosen, so those that it nearly chose count, too.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import numpy as np

from midfill.arrays import Float32Array

Operation = Literal["copy", "compute"]


class LayerSlots:
    """The slots of one layer.

    Args:
        held: the experts in the slots at first, one per slot, all different.
        scores: decides which expert goes first.
    """

    def __init__(self, held: Sequence[int], scores: "ExpertScores") -> None:
        self._slots = {expert: slot for slot, expert in enumerate(held)}
        self.scores = scores

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def held(self) -> Collection[int]:
        """The experts in the slots."""
        return self._slots.keys()

    def slot_of(self, expert: int) -> int:
        """Return the slot of an expert that is held."""
        return self._slots[expert]

    def operations(
        self, fast: Sequence[int], copied: Sequence[int]
    ) -> Iterator[tuple[Operation, int]]:
        """Yield what the device does in a step, in order, and give the slots away meanwhile.

        Experts are copied as soon as there is a slot whose own isn't needed in this step any more.

        Args:
            fast: the experts that it computes, in order, first those that are held.
            copied: those of them that aren't held, in the same order.
        """
        left, waiting = set(fast), deque(copied)
        for expert in (None, *fast):
            if expert is not None:
                yield "compute", expert
                left.remove(expert)
            while waiting and self.take(waiting[0], left) is not None:
                yield "copy", waiting.popleft()

    def take(self, expert: int, pinned: Collection[int]) -> int | None:
        """Give an expert the slot of the one with the lowest score.

        Args:
            expert: it is not held yet.
            pinned: experts that have to stay.

        Returns:
            The slot; None if all that are held have to stay.
        """
        others = [each for each in self._slots if each not in pinned]
        if not others:
            return None
        slot = self._slots.pop(self.scores.lowest(others))
        self._slots[expert] = slot
        return slot


class ExpertScores:
    """How much a layer's router has wanted each expert lately.

    An expert among the ``considered`` likeliest has its score moved towards its probability, any
    other one towards 0:  S <- decay * s + (1 - decay) * S.

    Args:
        experts: how many there are.
        considered: of how many probabilities count; the paper's twice those that are chosen.
        decay: see above; the paper's 0.5.
    """

    def __init__(self, experts: int, considered: int, decay: float = 0.5) -> None:
        self._scores = np.zeros(experts, np.float32)
        self._considered = min(considered, experts)
        self._decay = np.float32(decay)

    def update(self, shares: Float32Array) -> None:
        """Take note of a step.

        Args:
            shares: float32 [experts], their probabilities, on average over the step's rows.
        """
        likeliest = np.argsort(-shares, kind="stable")[: self._considered]
        seen = np.zeros_like(self._scores)
        seen[likeliest] = shares[likeliest]
        self._scores += self._decay * (seen - self._scores)

    def assign(self, experts: Sequence[int], scores: float | Float32Array) -> None:
        """Set the scores of experts, whatever steps have made of them.

        Args:
            experts: all different.
            scores: one for all of them, or float32 [len(experts)].
        """
        self._scores[list(experts)] = scores

    def lowest(self, experts: Sequence[int]) -> int:
        """Return the expert with the lowest score; of equal ones the first."""
        return experts[int(np.argmin(self._scores[list(experts)]))]
