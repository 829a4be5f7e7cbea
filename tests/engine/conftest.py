"""What holds for all engine tests."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Run torch on one thread: tiny models gain nothing from more, and lose much on busy cores."""
    if find_spec("torch") is None:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
