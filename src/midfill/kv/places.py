"""Places: cells of some slots, given out one token of one layer at a time.

A slot has a cell for each layer and KV head. Usually they hold one token's KV in all layers. Where
a sequence has KV of one layer at a time, as when a prompt is trimmed layer by layer, that would
leave all other cells unused. A *place* is what one token needs in one layer: the cells of one slot
that belong to all KV heads of one layer, whichever layer's KV they are used for.

A forward pass over one layer writes and reads places as if they were slots (``slot_numbers``).
"""

import numpy as np

from midfill.arrays import BoolArray, Int32Array, Int64Array


class Places:
    """The places of some slots, each free or taken.

    A place's number is ``index of its slot * layers + layer``, so those with the lowest numbers
    fill the fewest slots.

    Attributes:
        slots: [n] int32, whose places they are; the owner sees to it that nobody else uses them.
    """

    def __init__(self, slots: Int32Array, layers: int, kv_heads: int, total_slots: int) -> None:
        """Begin with all places free.

        Args:
            slots: see above.
            layers, kv_heads: of the model.
            total_slots: slots of the KV cache.
        """
        self.slots = slots
        self._layers, self._kv_heads, self._total = layers, kv_heads, total_slots
        self._free: BoolArray = np.ones(len(slots) * layers, bool)

    def take(self, count: int) -> Int64Array:
        """Take the first free places: [count] int64, ascending.

        Raises:
            ValueError: fewer are free.
        """
        found = np.flatnonzero(self._free)[:count]
        if len(found) < count:
            raise ValueError(f"{count} places requested, {len(found)} are free")
        self._free[found] = False
        return found

    def give_back(self, places: Int64Array) -> None:
        """Free [n] int64 places that were taken."""
        self._free[places] = True

    def give_back_all(self) -> None:
        """Free all places."""
        self._free[:] = True

    def slots_filled(self, taken: int) -> int:
        """Return how many slots so many places fill."""
        return -(-taken // self._layers)

    def first_places(self, slots: int) -> int:
        """Return how many places the first ``slots`` slots have."""
        return slots * self._layers

    def cells(self, places: Int64Array) -> Int32Array:
        """Return the cells of [n] int64 places: [kv_heads, n] int32."""
        index, layer = np.divmod(places, self._layers)
        first = layer * (self._kv_heads * self._total) + self.slots[index]
        heads = np.arange(self._kv_heads)[:, None] * self._total
        cells: Int32Array = (first + heads).astype(np.int32)
        return cells

    def slot_numbers(self, places: Int64Array, layer: int) -> Int32Array:
        """Return what a pass over a layer knows places by (``ForwardBatch.kv_slots``).

        Args:
            places: [n] int64.
            layer: the layer.

        Returns:
            [n] int32.
        """
        index, other = np.divmod(places, self._layers)
        away = (other - layer) * (self._kv_heads * self._total)
        numbers: Int32Array = (self.slots[index] + away).astype(np.int32)
        return numbers
