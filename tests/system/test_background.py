"""Work in the background is done, and leaves priority to whoever started it."""

import os
import sys
import threading

import pytest

from midfill.system.background import start_in_background


def test_the_work_is_done_on_a_thread_of_that_name() -> None:
    done: list[str] = []
    start_in_background(lambda: done.append(threading.current_thread().name), "store").join()
    assert done == ["store"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
def test_it_has_a_lower_priority_than_its_caller() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []
    work = start_in_background(lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)), "store")
    work.join()
    assert found == [max(own, 10)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
