"""JointSlots: slots that several answers to one prompt own together."""

from midfill.arrays import Int32Array
from midfill.kv.slots import SlotAllocator


class JointSlots:
    """Slots that the prefix cache must not hold; the last owner that releases them frees them."""

    def __init__(self, slots: Int32Array, allocator: SlotAllocator) -> None:
        """Own [n] int32 ``slots`` for one sequence; they return to ``allocator``."""
        self._slots = slots
        self._allocator = allocator
        self._owners = 1

    @property
    def owned(self) -> int:
        """Slots that would be free if one of the owners released them."""
        return len(self._slots) if self._owners == 1 else 0

    def share(self) -> "JointSlots":
        """Return the same slots, which have one owner more."""
        self._owners += 1
        return self

    def release(self) -> None:
        """Remove an owner; the last one frees the slots."""
        self._owners -= 1
        if not self._owners:
            self._allocator.free(self._slots)
