"""Mean time to first token of a prefill worker whose prompts are all alike, in closed form.

Source: "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model
Serving" (Zhong et al., OSDI 2024, arXiv 2401.09670), section 3.1. Prompts arrive by a Poisson
process and take the same time each (an M/D/1 queue). Tensor parallelism wins at low rates, where
computing is what takes long, pipelining at high rates, where waiting is.
"""

from math import inf


def one_device_ttft(rate: float, seconds: float) -> float:
    """Return the mean time to first token on one device (equation 1), in seconds.

    Args:
        rate: prompts per second.
        seconds: of one prompt's prefill.
    """
    load = rate * seconds
    return seconds + rate * seconds**2 / (2 * (1 - load)) if load < 1 else inf


def two_stage_ttft(rate: float, seconds: float) -> float:
    """Return the mean with the layers on two devices, one after the other (equation 2)."""
    load = rate * seconds
    return seconds + rate * seconds**2 / (4 * (2 - load)) if load < 2 else inf


def two_way_tensor_ttft(rate: float, seconds: float, speed_up: float) -> float:
    """Return the mean with each layer divided between two devices (equation 3).

    Args:
        rate, seconds: as for one device.
        speed_up: how much faster a prefill is for it; between 1 and 2.
    """
    load = rate * seconds
    if load >= speed_up:
        return inf
    return seconds / speed_up + rate * seconds**2 / (2 * speed_up * (speed_up - load))
