"""Memory for pools: zeros, writable, and taken only as it is written to."""

import sys

import numpy as np
import pytest

from midfill.kernels.cpu.memory import untouched


def test_it_is_zero_and_can_be_written() -> None:
    numbers = untouched(1000, np.uint16)
    assert numbers.dtype == np.uint16
    assert not numbers.any()
    numbers[7] = 9
    assert numbers.sum() == 9
    assert untouched(0, np.float32).shape == (0,)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_written_number_takes_a_page_and_not_millions_of_bytes() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    numbers = untouched(2**28, np.uint8)
    before = resident()
    numbers[:: 2**22] = 1
    assert 64 <= resident() - before < 64 * 16
