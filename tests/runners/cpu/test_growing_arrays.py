"""GrowingArrays: memory that stays from step to step."""

import numpy as np

from midfill.runners.cpu.growing_arrays import GrowingArrays


def test_an_array_stays_while_it_is_large_enough() -> None:
    arrays = GrowingArrays()
    first = arrays.floats("logits", 100)
    assert first.dtype == np.float32
    assert first.size == 100
    assert arrays.floats("logits", 60) is first
    assert arrays.floats("other", 60) is not first
    assert arrays.bytes("blocks", 7).dtype == np.uint8


def test_one_that_grows_little_by_little_is_replaced_seldom() -> None:
    arrays = GrowingArrays()
    seen = {id(array): array for array in (arrays.floats("rows", n) for n in range(1, 1000))}
    assert len(seen) < 40
    assert max(array.size for array in seen.values()) < 1.25 * 1000


def test_one_that_grows_much_has_the_size_that_is_needed() -> None:
    arrays = GrowingArrays()
    arrays.floats("rows", 10)
    assert arrays.floats("rows", 1000).size == 1000


def test_arrays_begin_on_a_cache_line() -> None:
    arrays = GrowingArrays()
    assert all(arrays.floats("rows", n).ctypes.data % 64 == 0 for n in (3, 50, 1000))
