"""SlotAllocator: every slot is allocated once and freed once."""

import numpy as np
import pytest

from midfill.kv.pool import OutOfSlotsError, SlotAllocator


def test_a_new_pool_allocates_ascending_slots() -> None:
    slots = SlotAllocator(8)
    assert slots.allocate(3).tolist() == [0, 1, 2]
    assert slots.allocate(2).tolist() == [3, 4]
    assert slots.free_slots == 3


def test_freed_slots_are_allocated_again_in_the_same_order() -> None:
    slots = SlotAllocator(8)
    taken = slots.allocate(6)
    slots.free(taken[2:5])
    assert slots.allocate(3).tolist() == [2, 3, 4]


def test_all_slots_can_be_allocated_none_of_them_twice() -> None:
    slots = SlotAllocator(5)
    taken = np.concatenate([slots.allocate(2), slots.allocate(3)])
    assert sorted(taken.tolist()) == [0, 1, 2, 3, 4]
    assert taken.dtype == np.int32


def test_allocating_too_many_allocates_nothing() -> None:
    slots = SlotAllocator(4)
    slots.allocate(2)
    with pytest.raises(OutOfSlotsError, match="3 slots requested, 2 are free"):
        slots.allocate(3)
    assert slots.free_slots == 2


@pytest.mark.parametrize("wrong", [[0, 0], [3], [-1], [4]])
def test_a_wrong_free_is_refused_and_changes_nothing(wrong: list[int]) -> None:
    slots = SlotAllocator(4)
    taken = slots.allocate(3)  # 3 stays free
    with pytest.raises(ValueError, match="slot"):
        slots.free(np.array(wrong, dtype=np.int32))
    assert slots.free_slots == 1
    slots.free(taken)
    assert sorted(slots.allocate(4).tolist()) == [0, 1, 2, 3]


def test_a_slot_cannot_be_freed_twice() -> None:
    slots = SlotAllocator(4)
    taken = slots.allocate(2)
    slots.free(taken[:1])
    with pytest.raises(ValueError, match="freed again"):
        slots.free(taken)
