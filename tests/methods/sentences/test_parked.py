"""ParkedKeys: whatever is fetched is what was parked, and only the difference is copied."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.arrays import Int32Array
from midfill.kv.ragged import cells_of_slots
from midfill.methods.sentences.parked import ParkedKeys
from midfill.runners.forward.cells import CellLayout

HEADS, SLOTS, WIDTHS = 3, 20, (4, 2)


class ByteCells:
    """Cells as bytes."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.arrays = [rng.integers(0, 256, (HEADS * SLOTS, w)).astype(np.uint8) for w in WIDTHS]
        self.layout = CellLayout("f16", WIDTHS)
        self.restored = 0

    def dump(self, cells: Int32Array) -> tuple[np.ndarray, ...]:
        return tuple(array[cells] for array in self.arrays)

    def restore(self, cells: Int32Array, arrays: tuple[np.ndarray, ...]) -> None:
        assert len(np.unique(cells)) == len(cells)
        self.restored += len(cells)
        for array, given_ in zip(self.arrays, arrays, strict=True):
            array[cells] = given_


def parked_keys(store: ByteCells, counts: list[int]) -> tuple[ParkedKeys, list[np.ndarray]]:
    """Park some keys, and return what they are: per array [heads, keys, width]."""
    parked = ParkedKeys(store, SLOTS, HEADS, sum(counts))  # type: ignore[arg-type]
    known: list[list[np.ndarray]] = [[], []]
    rng = np.random.default_rng(1)
    for count in counts:
        cells = cells_of_slots(np.arange(count, dtype=np.int32), HEADS, SLOTS)
        for array, values in zip(store.arrays, known, strict=True):
            array[cells] = rng.integers(0, 256, array[cells].shape)
            values.append(array[cells])
        parked.add(cells)
    return parked, [np.concatenate(values, axis=1) for values in known]


@given(st.integers(0, 2**31), st.integers(1, 8))
def test_every_row_finds_what_it_wants_and_copies_the_difference(seed: int, places: int) -> None:
    store, rng = ByteCells(), np.random.default_rng(seed)
    parked, known = parked_keys(store, [7, 5])
    assert parked.nbytes == HEADS * 12 * sum(WIDTHS)
    parked.use_slots(np.arange(SLOTS - places, SLOTS, dtype=np.int32)[::-1].copy())
    before = np.zeros((HEADS, 12), bool)
    for _ in range(6):
        wanted = np.zeros((HEADS, 12), bool)
        for head in range(HEADS):
            wanted[head, rng.permutation(12)[: rng.integers(0, places + 1)]] = True
        copied = parked.fetch(wanted)
        assert copied <= np.count_nonzero(wanted & ~before)
        assert parked.fetch(wanted) == 0
        head, number = np.nonzero(wanted)
        cells = parked.cells(head, number)
        assert (cells // SLOTS == head).all()
        for array, values in zip(store.arrays, known, strict=True):
            assert (array[cells] == values[head, number]).all()
        before = wanted
    assert store.restored > 0 or not before.any()


def test_places_grow_and_what_is_there_stays() -> None:
    store = ByteCells()
    parked, _ = parked_keys(store, [6])
    slots = np.array([15, 4, 9], np.int32)
    parked.use_slots(slots[:2])
    wanted = np.zeros((HEADS, 6), bool)
    wanted[:, 4:] = True
    assert parked.fetch(wanted) == 2 * HEADS
    parked.use_slots(slots)
    wanted[:, 0] = True
    assert parked.fetch(wanted) == HEADS


def test_too_much_is_refused() -> None:
    parked, _ = parked_keys(ByteCells(), [6])
    parked.use_slots(np.array([15, 4], np.int32))
    with pytest.raises(ValueError, match="more keys are wanted than 2 slots hold"):
        parked.fetch(np.ones((HEADS, 6), bool))
    with pytest.raises(ValueError, match="not in the pool"):
        parked.cells(np.array([0], np.int32), np.array([5], np.int32))
