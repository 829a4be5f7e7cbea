"""Simulates prefill and decode workers: a discrete-event simulation of whole requests.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670), section 4.1. A request goes to
the prefill worker with the shortest queue. When its first token is there, the decode worker with
the fewest requests is chosen, which pulls the KV as soon as it has room; until then the prompt
holds its pages. The workers are in ``simulated_workers``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.disaggregation.simulated_workers import (
    Clock,
    DecodeWorker,
    Job,
    PrefillWorker,
    SimulatedDecode,
    SimulatedPrefill,
    Transfer,
)
from benchmarks.disaggregation.workload import Arrival, Served
from midfill.errors import MidfillError

AT_ONCE = Transfer()


@dataclass(frozen=True, slots=True)
class Deployment:
    """Workers that serve together.

    Raises:
        MidfillError: one of the two kinds is missing.
    """

    prefill: tuple[PrefillWorker, ...]
    decode: tuple[DecodeWorker, ...]
    transfer: Transfer = AT_ONCE

    def __post_init__(self) -> None:
        for kind, workers in (("prefill", self.prefill), ("decode", self.decode)):
            if not workers:
                raise MidfillError(f"there is no {kind} worker; at least one is needed")


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulation's result.

    Attributes:
        served: how requests are served, in the order of their arrival.
        prefill_busy, decode_busy: share of the time until the last answer's end in which a worker
            of each kind computes, on average.
    """

    served: list[Served]
    prefill_busy: float
    decode_busy: float


def simulate(arrivals: Sequence[Arrival], deployment: Deployment) -> list[Served]:
    """Return how requests are served, in the order of their arrival.

    Raises:
        MidfillError: a request is too long for the workers.
    """
    return simulate_workers(arrivals, deployment).served


def simulate_workers(arrivals: Sequence[Arrival], deployment: Deployment) -> Simulated:
    """Return how requests are served, and how busy the workers are.

    Raises:
        MidfillError: a request is too long for the workers.
    """
    clock, served = Clock(), dict[int, Served]()
    decode = [
        SimulatedDecode(clock, worker, deployment.transfer, served) for worker in deployment.decode
    ]

    def bridge(job: Job) -> None:
        min(decode, key=lambda each: each.requests).offer(job)

    prefill = [SimulatedPrefill(clock, worker, bridge, served) for worker in deployment.prefill]
    jobs = _jobs(arrivals)
    _check(jobs, deployment.prefill, deployment.decode)
    for job in jobs:
        clock.at(job.arrival.seconds, partial(_submit, prefill, job))
    clock.run()
    return Simulated(
        _in_order(served, jobs),
        sum(worker.busy for worker in prefill) / len(prefill) / max(clock.now, 1e-9),
        sum(worker.busy for worker in decode) / len(decode) / max(clock.now, 1e-9),
    )


def simulate_prefill(arrivals: Sequence[Arrival], workers: Sequence[PrefillWorker]) -> list[Served]:
    """Return how requests' first tokens are served where decoding is no matter.

    Raises:
        MidfillError: a prompt is too long for the workers.
    """
    clock, served = Clock(), dict[int, Served]()

    def end(job: Job) -> None:
        served[job.number] = Served(job.arrival, job.first_token, job.first_token)
        job.release()

    queues = [SimulatedPrefill(clock, worker, end, served) for worker in workers]
    jobs = _jobs(arrivals)
    _check(jobs, workers, ())
    for job in jobs:
        clock.at(job.arrival.seconds, partial(_submit, queues, job))
    clock.run()
    return _in_order(served, jobs)


def simulate_decode(
    arrivals: Sequence[Arrival],
    workers: Sequence[DecodeWorker],
    transfer: Transfer = AT_ONCE,
) -> list[Served]:
    """Return how requests are decoded whose first tokens are there on arrival.

    Raises:
        MidfillError: a request is too long for the workers.
    """
    clock, served = Clock(), dict[int, Served]()
    queues = [SimulatedDecode(clock, worker, transfer, served) for worker in workers]
    jobs = _jobs(arrivals)
    _check(jobs, (), workers)

    def arrive(job: Job) -> None:
        job.first_token = clock.now
        if job.output == 1:
            served[job.number] = Served(job.arrival, clock.now, clock.now)
        else:
            min(queues, key=lambda each: each.requests).offer(job)

    for job in jobs:
        clock.at(job.arrival.seconds, partial(arrive, job))
    clock.run()
    return _in_order(served, jobs)


def _jobs(arrivals: Sequence[Arrival]) -> list[Job]:
    ordered = sorted(arrivals, key=lambda arrival: arrival.seconds)
    return [Job(number, arrival) for number, arrival in enumerate(ordered)]


def _check(
    jobs: Sequence[Job],
    prefill: Sequence[PrefillWorker],
    decode: Sequence[DecodeWorker],
) -> None:
    """Refuse requests that a worker could never serve, and that would wait there for ever."""
    for job in jobs:
        tokens = job.prompt + job.output
        if not all(worker.admits(job.prompt) for worker in prefill):
            raise MidfillError(f"a prompt of {job.prompt} tokens is too long for a prefill worker")
        if job.output > 1 and not all(worker.admits(tokens) for worker in decode):
            raise MidfillError(f"a request of {tokens} tokens is too long for a decode worker")


def _in_order(served: dict[int, Served], jobs: Sequence[Job]) -> list[Served]:
    assert len(served) == len(jobs), "a worker has stopped with requests in its queues"
    return [served[job.number] for job in jobs]


def _submit(queues: Sequence[SimulatedPrefill], job: Job) -> None:
    min(queues, key=lambda each: each.queued).submit(job)
