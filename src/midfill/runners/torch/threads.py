"""Small operations of torch beside the kernels, on one thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from splitting operations of some 100 us over threads.

    On busy cores the threads wait milliseconds for one that is not scheduled: measured with two
    threads on two busy cores, sampling took as long as the model.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
