"""Memory for kernels: aligned zeros, and pools that take memory only as they are written."""

import sys

import numpy as np
import pytest

from midfill.kernels.cpu.memory import LINE, aligned_zeros, small_page_zeros


def test_it_is_zero_and_can_be_written() -> None:
    numbers = small_page_zeros(1000, np.uint16)
    assert numbers.dtype == np.uint16
    assert not numbers.any()
    numbers[7] = 9
    assert numbers.sum() == 9
    assert small_page_zeros(0, np.float32).shape == (0,)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_written_number_takes_a_page_and_not_millions_of_bytes() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    numbers = small_page_zeros(2**28, np.uint8)
    before = resident()
    numbers[:: 2**22] = 1
    assert 64 <= resident() - before < 64 * 16


@pytest.mark.parametrize("shape", [1, 1000, (3, 16), 10**6])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int8])
def test_zeros_of_any_shape_start_at_a_line(shape: int | tuple[int, ...], dtype: type) -> None:
    made = [aligned_zeros(shape, dtype) for _ in range(5)]
    for array in made:
        assert array.ctypes.data % LINE == 0
        assert array.flags.c_contiguous
        assert array.dtype == dtype
        assert array.shape == np.zeros(shape).shape
        assert not array.any()
        array.fill(1)
