"""The event simulation agrees with the closed forms of DistServe's section 3.1.

Prompts that are all alike arrive by a Poisson process and take the same time each (an M/D/1 queue).
Tensor parallelism wins at low rates, where computing is what takes long, pipelining at high rates,
where waiting is.
"""

from math import inf
from statistics import mean

import pytest

from benchmarks.disaggregation.latency import PrefillLatency
from benchmarks.disaggregation.simulated_workers import PrefillWorker
from benchmarks.disaggregation.simulator import simulate_prefill
from benchmarks.disaggregation.workload import Lengths, poisson_arrivals
from midfill.engine.disaggregated.workers import Pool


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


SECONDS = 0.5
ALIKE = [Lengths(1000, 1)]


def simulated_ttft(rate: float, seconds: float, stages: int = 1) -> float:
    worker = PrefillWorker(
        latency=PrefillLatency(seconds, 0.0, 0.0),
        pool=Pool(pages=10**9),
        stages=stages,
        stage_seconds=0.0,
    )
    arrivals = poisson_arrivals(ALIKE, rate, 20_000, seed=3)
    return mean(one.ttft for one in simulate_prefill(arrivals, [worker]))


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
class TestUniformPrompts:
    def test_on_one_device(self, load: float) -> None:
        rate = load / SECONDS
        assert simulated_ttft(rate, SECONDS) == pytest.approx(
            one_device_ttft(rate, SECONDS), rel=0.05
        )

    def test_in_two_stages(self, load: float) -> None:
        rate = load / SECONDS
        assert simulated_ttft(rate, SECONDS, stages=2) == pytest.approx(
            two_stage_ttft(rate, SECONDS), rel=0.05
        )

    def test_on_two_devices_by_tensor(self, load: float) -> None:
        rate, speed_up = load / SECONDS, 1.6
        assert simulated_ttft(rate, SECONDS / speed_up) == pytest.approx(
            two_way_tensor_ttft(rate, SECONDS, speed_up), rel=0.05
        )


def test_tensor_parallelism_wins_at_low_rates_and_stages_at_high_ones() -> None:
    low, high = 0.2 / SECONDS, 1.5 / SECONDS
    assert two_way_tensor_ttft(low, SECONDS, 1.6) < two_stage_ttft(low, SECONDS)
    assert two_way_tensor_ttft(high, SECONDS, 1.6) > two_stage_ttft(high, SECONDS)


def test_a_worker_that_gets_more_than_it_can_do_never_catches_up() -> None:
    assert one_device_ttft(2.0, 0.5) == inf
    assert two_stage_ttft(4.0, 0.5) == inf
    assert two_way_tensor_ttft(3.2, 0.5, 1.6) == inf
