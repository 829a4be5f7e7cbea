"""Places: one token's cells of one layer, in whatever slots."""

import numpy as np
import pytest

from midfill.kv.places import Places

LAYERS, KV_HEADS, TOTAL = 3, 2, 10


def places() -> Places:
    return Places(np.array([7, 2], np.int32), LAYERS, KV_HEADS, TOTAL)


def test_the_first_places_fill_the_first_slots() -> None:
    held = places()
    first = held.take(3)
    assert first.tolist() == [0, 1, 2]
    assert (held.cells(first) % TOTAL == 7).all()
    assert (held.cells(held.take(3)) % TOTAL == 2).all()
    assert [held.slots_filled(count) for count in (0, 1, 3, 4)] == [0, 1, 1, 2]
    assert held.first_places(1) == 3


def test_all_places_together_are_all_cells_of_the_slots() -> None:
    held = places()
    cells = held.cells(held.take(6))
    assert cells.shape == (KV_HEADS, 6)
    heads, slots = np.divmod(cells, TOTAL)
    assert {(int(h), int(s)) for h, s in zip(heads.flat, slots.flat, strict=True)} == {
        (head, slot) for head in range(LAYERS * KV_HEADS) for slot in (7, 2)
    }


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_pass_over_a_layer_finds_a_places_cells_by_its_slot_number(layer: int) -> None:
    held = places()
    taken = held.take(6)
    numbers = held.slot_numbers(taken, layer)
    first_head = layer * KV_HEADS
    for head in range(KV_HEADS):
        expected = held.cells(taken)[head]
        assert ((first_head + head) * TOTAL + numbers == expected).all()


def test_what_is_given_back_is_taken_again_and_no_more() -> None:
    held = places()
    taken = held.take(6)
    held.give_back(taken[[1, 4]])
    assert held.take(2).tolist() == [1, 4]
    with pytest.raises(ValueError, match="1 places requested, 0 are free"):
        held.take(1)
