"""CompressedPrefix: cells that stand for the first tokens of a sequence, in slots of their own."""

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.pool import SlotAllocator
from midfill.kv.ragged import RaggedIndex


class CompressedPrefix:
    """The KV that a method has left of a sequence's first tokens.

    Answers to one prompt share it; the last one that releases it frees its slots. It is never
    found by other requests: only exact KV is in the prefix cache.

    Attributes:
        tokens: how many leading tokens it stands for.
        gapless: whether its keys were moved together, so that they lie side by side.
        origin: number of the token that would be at position 0: later tokens are at positions that
            are smaller than their numbers by as much.
        index: its cells.
        numbers: [n] int32, which token each of the index's cells is of; -1 where it stands for
            several.
        slots: [n] int32, the slots that the cells fill.
    """

    def __init__(
        self,
        tokens: int,
        index: RaggedIndex,
        slots: Int32Array,
        allocator: SlotAllocator,
        gapless: bool = False,
        numbers: Int32Array | None = None,
        origin: int = 0,
    ) -> None:
        """Own ``slots`` for one sequence; they return to ``allocator``.

        Args:
            tokens, index, slots, gapless, origin: see above.
            numbers: see above; None says of no cell.
            allocator: where the slots come from.
        """
        self.tokens = tokens
        self.gapless = gapless
        self.origin = origin
        self.index = index
        self.slots = slots
        self.numbers = np.full(len(index.cells), -1, np.int32) if numbers is None else numbers
        self._allocator = allocator
        self._users = 1

    @property
    def owned(self) -> int:
        """Slots that would be free if one of its users released it."""
        return len(self.slots) if self._users == 1 else 0

    def share(self) -> "CompressedPrefix":
        """Return the same prefix, which has one user more."""
        self._users += 1
        return self

    def release(self) -> None:
        """Remove a user; the last one frees the slots."""
        self._allocator.free(self.take_over())

    def take_over(self) -> Int32Array:
        """Remove a user; return the slots that are the caller's from now on: the last user's."""
        self._users -= 1
        return self.slots[: 0 if self._users else len(self.slots)]
