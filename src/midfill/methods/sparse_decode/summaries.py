"""SummaryTable: where the summaries of pages of keys are, and which of them are there.

The runner keeps the summaries themselves (``runners.forward.page_selection``), by numbers that are
given out here. Each has as many references as sequences use it, and one more while it is known by a
cached slot: prompts share only what they begin with, so the slot of a page's last token says what
all of the page holds, until it is allocated again. So a prompt whose KV is cached finds its
summaries, too.
"""

from collections.abc import Hashable

import numpy as np

from midfill.arrays import BoolArray, Int32Array
from midfill.kv.pool import SlotAllocator

_NONE = -1
_FIRST = 64


class SummaryTable:
    """Gives out numbers of summaries.

    Args:
        slots: of the KV cache.
    """

    def __init__(self, slots: SlotAllocator) -> None:
        self._uses = slots.count_uses()
        self._known: dict[Hashable, tuple[Int32Array, Int32Array]] = {}
        self._references: Int32Array = np.zeros(0, np.int32)
        self._written: BoolArray = np.zeros(0, bool)
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """How many numbers are given out."""
        return int(np.count_nonzero(self._references))

    def find(self, variant: Hashable, slots: Int32Array) -> Int32Array:
        """Return the summaries of cached pages, new ones for pages that are not known yet.

        Args:
            variant: what the summaries depend on beside the tokens.
            slots: [n] int32, of each page's last token.

        Returns:
            [n] int32, each with a reference more.
        """
        if variant not in self._known:
            nothing = np.full(len(self._uses), _NONE, np.int32)
            self._known[variant] = nothing, nothing.copy()
        entries, uses = self._known[variant]
        stale = slots[(entries[slots] != _NONE) & (uses[slots] != self._uses[slots])]
        self.release(entries[stale])
        entries[stale] = _NONE
        # Those that are known must not be taken away to make room for those that aren't.
        known = slots[entries[slots] != _NONE]
        self.share(entries[known])
        missing = slots[entries[slots] == _NONE]
        created = self.create(len(missing))
        entries[missing], uses[missing] = created, self._uses[missing]
        self.share(created)
        return entries[slots].copy()

    def create(self, count: int) -> Int32Array:
        """Return [count] int32 new summaries, nothing of which is written, with one reference."""
        if count > len(self._free):
            self._forget_stale()
        if count > len(self._free):
            before = len(self._references)
            added = max(count - len(self._free), before, _FIRST)
            self._references = np.append(self._references, np.zeros(added, np.int32))
            self._written = np.append(self._written, np.zeros(added, bool))
            # Ascending numbers are given out first, so that pages follow one another in memory.
            self._free = [*range(before + added - 1, before - 1, -1), *self._free]
        taken = [self._free.pop() for _ in range(count)]
        created = np.array(taken, np.int32)
        self._references[created] = 1
        self._written[created] = False
        return created

    def share(self, entries: Int32Array) -> None:
        """Note another reference to each of some summaries."""
        self._references[entries] += 1

    def release(self, entries: Int32Array) -> None:
        """Give up a reference to each of some summaries."""
        self._references[entries] -= 1
        self._free += entries[self._references[entries] == 0][::-1].tolist()

    def mark(self, entries: Int32Array, *, written: bool) -> None:
        """Note whether some summaries are there."""
        self._written[entries] = written

    def missing(self, entries: Int32Array) -> Int32Array:
        """Return which of [n] summaries are not there: [m] int32 places."""
        return np.flatnonzero(~self._written[entries]).astype(np.int32)

    def _forget_stale(self) -> None:
        """Give up the references of slots that hold something else by now."""
        for entries, uses in self._known.values():
            stale = np.flatnonzero((entries != _NONE) & (uses != self._uses))
            self.release(entries[stale])
            entries[stale] = _NONE
