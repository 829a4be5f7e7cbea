"""The search finds what trying everything finds."""

from dataclasses import dataclass, replace
from math import ceil

import pytest

from benchmarks.disaggregation.latency import DecodeCost, DecodeLatency, PrefillLatency
from benchmarks.disaggregation.placement import (
    NodeGroup,
    Shape,
    Trial,
    deployment_goodput,
    phase_goodput,
    place_anywhere,
    place_within_nodes,
)
from benchmarks.disaggregation.simulated_workers import DecodeWorker, PrefillWorker, Transfer
from benchmarks.disaggregation.simulator import Deployment, simulate
from benchmarks.disaggregation.workload import Lengths, Targets, attainment, poisson_arrivals
from midfill.engine.disaggregated.workers import Pool
from midfill.errors import MidfillError

HISTORY = [Lengths(prompt, output) for prompt in (200, 400, 800) for output in (20, 60)]
TRIAL = Trial(
    history=HISTORY,
    targets=Targets(ttft=0.4, tpot=0.03),
    requests=60,
    runs=1,
    precision=0.2,
    max_rate=8.0,
)
TRANSFER = Transfer(seconds_per_token=1e-6)


@dataclass(frozen=True)
class Shapes:
    """A small model: dividing layers between two devices makes it 1.6 times as fast."""

    least_devices: int = 1

    def _speed_up(self, tensor: int, stages: int) -> float | None:
        fits = tensor in (1, 2) and tensor * stages >= self.least_devices
        return (1.0, 1.6)[tensor - 1] if fits else None

    def prefill(self, tensor: int, stages: int) -> PrefillWorker | None:
        if (speed_up := self._speed_up(tensor, stages)) is None:
            return None
        return PrefillWorker(
            latency=PrefillLatency(0.01 / speed_up, 3e-4 / speed_up, 2e-8 / speed_up),
            pool=Pool(pages=1000),
            stages=stages,
            devices=tensor * stages,
        )

    def decode(self, tensor: int, stages: int) -> DecodeWorker | None:
        if (speed_up := self._speed_up(tensor, stages)) is None:
            return None
        cost = DecodeCost(0.02 / speed_up, 1e-7, 5e-4 / speed_up)
        return DecodeWorker(
            latency=DecodeLatency(cost, cost, 1),
            pool=Pool(pages=2000),
            stages=stages,
            devices=tensor * stages,
        )


def test_the_best_workers_of_each_phase_are_those_of_trying_all_of_them() -> None:
    rate = 20.0
    choices = place_anywhere(Shapes(), 3, rate, TRIAL, TRANSFER)
    for phase, choice in zip(("prefill", "decode"), choices, strict=True):
        shapes = [Shape(1, 1), Shape(1, 2), Shape(1, 3), Shape(2, 1), Shape(3, 1)]
        tried = {
            shape: phase_goodput(Shapes(), phase, shape, TRIAL, TRANSFER) / shape.devices
            for shape in shapes
        }
        assert tried[choice.shape] == max(tried.values())
        assert choice.replicas == ceil(rate / choice.goodput)


def test_the_best_group_within_nodes_is_that_of_trying_all_of_them() -> None:
    found = place_within_nodes(Shapes(), 2, 3, 20.0, TRIAL, TRANSFER)
    pairs = [
        ((1, 1), (1, 1)), ((1, 1), (1, 2)), ((1, 1), (2, 1)), ((1, 2), (1, 1)), ((2, 1), (1, 1)),
    ]  # fmt: skip
    tried = {}
    for nodes in (1, 2):
        for prefill, decode in pairs:
            one = Shapes().prefill(prefill[0], prefill[1] * nodes)
            other = Shapes().decode(decode[0], decode[1] * nodes)
            assert one is not None
            assert other is not None
            deployment = Deployment((one,), (other,), TRANSFER)
            group = NodeGroup(nodes, Shape(*prefill), Shape(*decode))
            assert group.devices == deployment.devices
            tried[group] = deployment_goodput(deployment, TRIAL) / group.devices
    assert tried[found.group] == max(tried.values())
    assert found.goodput == pytest.approx(max(tried.values()) * found.group.devices)


def test_more_devices_never_serve_less() -> None:
    prefill, decode = Shapes().prefill(1, 1), Shapes().decode(1, 1)
    assert prefill is not None
    assert decode is not None
    served = [
        deployment_goodput(Deployment((prefill,) * count, (decode,) * count, TRANSFER), TRIAL)
        for count in (1, 2, 3)
    ]
    assert served == sorted(served)
    assert served[0] > 0


def test_other_requests_at_the_goodput_meet_the_targets_too() -> None:
    trial = replace(TRIAL, requests=1000, runs=3, precision=0.1)
    prefill, decode = Shapes().prefill(1, 1), Shapes().decode(1, 1)
    assert prefill is not None
    assert decode is not None
    deployment = Deployment((prefill,), (decode,), TRANSFER)
    rate = deployment_goodput(deployment, trial)
    arrivals = poisson_arrivals(HISTORY, rate, 2000, seed=trial.seed + trial.runs)
    assert attainment(simulate(arrivals, deployment), trial.targets) >= 0.9


def test_a_model_that_needs_several_devices_gets_them() -> None:
    prefill, decode = place_anywhere(Shapes(least_devices=2), 2, 1.0, TRIAL, TRANSFER)
    assert prefill.shape.devices == decode.shape.devices == 2


def test_targets_that_nothing_meets_are_said_to_be_so() -> None:
    trial = replace(TRIAL, targets=Targets(ttft=0.001, tpot=0.03))
    with pytest.raises(MidfillError, match="no prefill worker of up to 2 devices"):
        place_anywhere(Shapes(), 2, 1.0, trial, TRANSFER)
    with pytest.raises(MidfillError, match="no workers on up to 1 nodes"):
        place_within_nodes(Shapes(), 1, 2, 1.0, trial, TRANSFER)
