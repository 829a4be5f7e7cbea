"""Which workers serve most requests per device within their targets of latency.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670), section 4, algorithms 1 and 2. The
goodput of a deployment is the highest rate at which a simulation of requests meets both targets
often enough; it is found by bisection. Where every device reaches every other one fast, the best
prefill and the best decode worker are found apart, and each is replicated as the rate demands.
Where only the devices of a node do, stages of both stand side by side on each node, so that KV
never leaves it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Protocol

from benchmarks.disaggregation.simulated_workers import DecodeWorker, PrefillWorker, Transfer
from benchmarks.disaggregation.simulator import (
    Deployment,
    simulate,
    simulate_decode,
    simulate_prefill,
)
from benchmarks.disaggregation.workload import (
    Arrival,
    Lengths,
    Served,
    Targets,
    attainment,
    poisson_arrivals,
)
from midfill.errors import MidfillError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What rates are tried with.

    Attributes:
        history: lengths of past requests.
        targets: what has to be met.
        requests: of each simulation.
        runs: simulations of each rate, each with requests of its own; all have to meet the targets.
            Near its limit a queue's length depends much on chance: of a single run, the found rate
            would be one at which that run was lucky.
        seed: of the first run's lengths and arrivals.
        max_rate: highest rate per device that is looked for, in requests per second.
        precision: the search ends when the rate is known to this.
    """

    history: Sequence[Lengths]
    targets: Targets
    requests: int = 1000
    runs: int = 3
    seed: int = 0
    max_rate: float = 16.0
    precision: float = 0.5


class WorkerShapes(Protocol):
    """The workers that a model and a machine allow."""

    def prefill(self, tensor: int, stages: int) -> PrefillWorker | None:
        """Return a prefill worker of ``tensor * stages`` devices; None if the model doesn't fit."""
        ...

    def decode(self, tensor: int, stages: int) -> DecodeWorker | None:
        """Return a decode worker of ``tensor * stages`` devices; None if the model doesn't fit."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """How a worker's devices divide the model: ``tensor`` ways within a layer, into ``stages``."""

    tensor: int
    stages: int

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.tensor * self.stages


@dataclass(frozen=True, slots=True)
class PhaseChoice:
    """The best workers of one phase.

    Attributes:
        shape: of each.
        goodput: requests per second of one.
        replicas: how many the rate demands.
    """

    shape: Shape
    goodput: float
    replicas: int


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """A prefill and a decode worker whose stages stand side by side on each of some nodes.

    Attributes:
        nodes: over which the layers are divided.
        prefill, decode: shapes on each node.
    """

    nodes: int
    prefill: Shape
    decode: Shape

    @property
    def devices(self) -> int:
        """Devices on all of its nodes."""
        return self.nodes * (self.prefill.devices + self.decode.devices)


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """The best group of workers whose KV stays within nodes.

    Attributes:
        group: its shapes.
        goodput: requests per second of one.
        replicas: how many the rate demands.
    """

    group: NodeGroup
    goodput: float
    replicas: int


def goodput(serve: Callable[[list[Arrival]], list[Served]], devices: int, trial: Trial) -> float:
    """Return the highest rate, in requests per second, at which enough requests meet the targets.

    Args:
        serve: simulates requests; a MidfillError means that it can't serve them at all.
        devices: which it occupies.
        trial: what rates are tried with.
    """

    def holds(rate: float) -> bool:
        for seed in range(trial.seed, trial.seed + trial.runs):
            arrivals = poisson_arrivals(trial.history, rate * devices, trial.requests, seed)
            try:
                served = serve(arrivals)
            except MidfillError:
                return False
            if attainment(served, trial.targets) < trial.targets.share:
                return False
        return True

    low, high = 0.0, trial.max_rate
    while high - low >= trial.precision:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low * devices


def deployment_goodput(deployment: Deployment, trial: Trial) -> float:
    """Return the goodput of workers that serve together."""
    return goodput(lambda arrivals: simulate(arrivals, deployment), deployment.devices, trial)


def place_anywhere(
    shapes: WorkerShapes, devices: int, rate: float, trial: Trial, transfer: Transfer
) -> tuple[PhaseChoice, PhaseChoice]:
    """Return the best prefill and decode workers where KV may go from any device to any other.

    Args:
        shapes: the workers that are possible.
        devices: at most so many per worker.
        rate: requests per second that all together have to serve.
        trial: what rates are tried with.
        transfer: how KV moves.

    Raises:
        MidfillError: no worker meets the targets at any rate.
    """
    found: list[PhaseChoice] = []
    for phase in ("prefill", "decode"):
        best, most = None, 0.0
        for shape in possible_shapes(devices):
            per_device = phase_goodput(shapes, phase, shape, trial, transfer) / shape.devices
            if per_device > most:
                best, most = shape, per_device
        if best is None:
            raise MidfillError(
                f"no {phase} worker of up to {devices} devices meets the targets at any rate"
            )
        served = most * best.devices
        found.append(PhaseChoice(best, served, max(1, ceil(rate / served))))
    return found[0], found[1]


def phase_goodput(
    shapes: WorkerShapes, phase: str, shape: Shape, trial: Trial, transfer: Transfer
) -> float:
    """Return the goodput of one worker of a phase, whose own target alone counts."""
    if phase == "prefill":
        prefill = shapes.prefill(shape.tensor, shape.stages)
        if prefill is None:
            return 0.0
        return goodput(partial(simulate_prefill, workers=[prefill]), shape.devices, trial)
    decode = shapes.decode(shape.tensor, shape.stages)
    if decode is None:
        return 0.0
    serve = partial(simulate_decode, workers=[decode], transfer=transfer)
    return goodput(serve, shape.devices, trial)


def place_within_nodes(
    shapes: WorkerShapes,
    nodes: int,
    node_devices: int,
    rate: float,
    trial: Trial,
    transfer: Transfer,
) -> GroupChoice:
    """Return the best group of workers where KV should not leave a node.

    Args:
        shapes: the workers that are possible.
        nodes: at most so many per group.
        node_devices: devices of a node.
        rate, trial, transfer: as in ``place_anywhere``.

    Raises:
        MidfillError: no group meets the targets at any rate.
    """
    best, most = None, 0.0
    for group in possible_groups(nodes, node_devices):
        served = group_goodput(shapes, group, trial, transfer)
        if served / group.devices > most:
            most = served / group.devices
            replicas = max(1, ceil(rate / served))
            best = GroupChoice(group, served, replicas)
    if best is None:
        raise MidfillError(
            f"no workers on up to {nodes} nodes of {node_devices} devices meet the targets at any"
            " rate"
        )
    return best


def group_goodput(
    shapes: WorkerShapes, group: NodeGroup, trial: Trial, transfer: Transfer
) -> float:
    """Return the goodput of a group; 0 if the model doesn't fit."""
    prefill = shapes.prefill(group.prefill.tensor, group.prefill.stages * group.nodes)
    decode = shapes.decode(group.decode.tensor, group.decode.stages * group.nodes)
    if prefill is None or decode is None:
        return 0.0
    return deployment_goodput(Deployment((prefill,), (decode,), transfer), trial)


def possible_shapes(devices: int) -> Iterator[Shape]:
    """Yield all shapes of up to so many devices."""
    for tensor in range(1, devices + 1):
        for stages in range(1, devices // tensor + 1):
            yield Shape(tensor, stages)


def possible_groups(nodes: int, node_devices: int) -> Iterator[NodeGroup]:
    """Yield all groups of up to so many nodes whose workers fit on each node together."""
    for count in range(1, nodes + 1):
        for prefill in possible_shapes(node_devices - 1):
            for decode in possible_shapes(node_devices - prefill.devices):
                yield NodeGroup(count, prefill, decode)
