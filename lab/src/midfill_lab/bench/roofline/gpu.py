"""A GPU's ceilings: bytes copied and operations done per second."""

import statistics
from collections.abc import Callable

import torch

_COPIED = 1 << 30
_WIDTH = 8192
_RUNS = 8
_WARM_UPS = 2


def gpu_name(device: str) -> str:
    """Return a GPU's name and the PyTorch that runs on it."""
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def copied_per_second(device: str) -> float:
    """Return the bytes per second that a copy within a GPU's memory moves, read and written.

    Nothing of that memory is kept: servers that are started next need it.
    """
    speed = 2 * _COPIED / _copy_seconds(device)
    torch.cuda.empty_cache()
    return speed


def bfloat16_per_second(device: str) -> float:
    """Return the operations per second of a large product of bfloat16."""
    factor = torch.randn(_WIDTH, _WIDTH, device=device, dtype=torch.bfloat16)
    return 2 * _WIDTH**3 / _seconds(lambda: factor @ factor)


def _copy_seconds(device: str) -> float:
    source = torch.randn(_COPIED // 4, device=device)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source))


def _seconds(call: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(_RUNS):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times[_WARM_UPS:])
