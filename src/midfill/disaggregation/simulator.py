"""Simulates prefill and decode workers: a discrete-event simulation of whole requests.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670), section 4.1. A request goes to
the prefill worker with the shortest queue. When its first token is there, the decode worker with
the fewest requests is chosen, which pulls the KV as soon as it has room; until then the prompt
holds its pages. Steps take what the fitted latency models say. A transfer takes a time by token,
one prompt at a time per decode worker. Swapping to host memory takes no time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from midfill.disaggregation.workers import (
    DecodeWorker,
    PrefillWorker,
    plan_decode_step,
    prefill_batch,
)
from midfill.disaggregation.workload import Arrival, Served
from midfill.errors import MidfillError


@dataclass(frozen=True, slots=True)
class Transfer:
    """How KV goes from a prefill to a decode worker.

    Attributes:
        seconds_per_token: of a prompt.
        constant: seconds of each pull.
        between_steps: whether the prefill worker copies between its steps only, so that a pull
            waits for the one in progress.
    """

    seconds_per_token: float = 0.0
    constant: float = 0.0
    between_steps: bool = False

    def seconds(self, tokens: int) -> float:
        """Return the seconds that a prompt's KV takes."""
        return self.constant + self.seconds_per_token * tokens


@dataclass(frozen=True, slots=True)
class Deployment:
    """Workers that serve together.

    Raises:
        MidfillError: one of the two kinds is missing.
    """

    prefill: tuple[PrefillWorker, ...]
    decode: tuple[DecodeWorker, ...]
    transfer: Transfer = Transfer()

    def __post_init__(self) -> None:
        for kind, workers in (("prefill", self.prefill), ("decode", self.decode)):
            if not workers:
                raise MidfillError(f"there is no {kind} worker; at least one is needed")

    @property
    def devices(self) -> int:
        """Devices of all workers."""
        return sum(one.devices for one in self.prefill) + sum(one.devices for one in self.decode)


def simulate(arrivals: Sequence[Arrival], deployment: Deployment) -> list[Served]:
    """Return how requests are served, in the order of their arrival.

    Raises:
        MidfillError: a request is too long for the workers.
    """
    clock, served = _Clock(), dict[int, Served]()
    decode = [
        _DecodeQueue(clock, worker, deployment.transfer, served) for worker in deployment.decode
    ]

    def bridge(job: _Job) -> None:
        min(decode, key=lambda each: each.requests).offer(job)

    prefill = [_PrefillQueue(clock, worker, bridge, served) for worker in deployment.prefill]
    jobs = _jobs(arrivals)
    _check(jobs, deployment.prefill, deployment.decode)
    for job in jobs:
        clock.at(job.arrival.seconds, partial(_submit, prefill, job))
    clock.run()
    return _in_order(served, jobs)


def simulate_prefill(arrivals: Sequence[Arrival], workers: Sequence[PrefillWorker]) -> list[Served]:
    """Return how requests' first tokens are served where decoding is no matter.

    Raises:
        MidfillError: a prompt is too long for the workers.
    """
    clock, served = _Clock(), dict[int, Served]()

    def end(job: _Job) -> None:
        served[job.number] = Served(job.arrival, job.first_token, job.first_token)
        job.release()

    queues = [_PrefillQueue(clock, worker, end, served) for worker in workers]
    jobs = _jobs(arrivals)
    _check(jobs, workers, ())
    for job in jobs:
        clock.at(job.arrival.seconds, partial(_submit, queues, job))
    clock.run()
    return _in_order(served, jobs)


def simulate_decode(
    arrivals: Sequence[Arrival],
    workers: Sequence[DecodeWorker],
    transfer: Transfer = Transfer(),
) -> list[Served]:
    """Return how requests are decoded whose first tokens are there on arrival.

    Raises:
        MidfillError: a request is too long for the workers.
    """
    clock, served = _Clock(), dict[int, Served]()
    queues = [_DecodeQueue(clock, worker, transfer, served) for worker in workers]
    jobs = _jobs(arrivals)
    _check(jobs, (), workers)

    def arrive(job: _Job) -> None:
        job.first_token = clock.now
        if job.output == 1:
            served[job.number] = Served(job.arrival, clock.now, clock.now)
        else:
            min(queues, key=lambda each: each.requests).offer(job)

    for job in jobs:
        clock.at(job.arrival.seconds, partial(arrive, job))
    clock.run()
    return _in_order(served, jobs)


def _jobs(arrivals: Sequence[Arrival]) -> "list[_Job]":
    ordered = sorted(arrivals, key=lambda arrival: arrival.seconds)
    return [_Job(number, arrival) for number, arrival in enumerate(ordered)]


def _check(
    jobs: "Sequence[_Job]",
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


def _in_order(served: dict[int, Served], jobs: "Sequence[_Job]") -> list[Served]:
    assert len(served) == len(jobs), "a worker has stopped with requests in its queues"
    return [served[job.number] for job in jobs]


def _submit(queues: "Sequence[_PrefillQueue]", job: "_Job") -> None:
    min(queues, key=lambda each: each.queued).submit(job)


class _Clock:
    """What happens when; ``now`` is the time of what happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


class _Pipeline:
    """Stages that one batch after another goes through."""

    def __init__(self, stages: int) -> None:
        self._free = [0.0] * stages

    @property
    def next_entry(self) -> float:
        """When the first stage is free."""
        return self._free[0]

    def enter(self, now: float, seconds: float) -> float:
        """Send in a batch that takes so long in each stage; return when it leaves the last one."""
        for stage, free in enumerate(self._free):
            now = max(now, free) + seconds
            self._free[stage] = now
        return now


class _Job:
    """A request in the simulation."""

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.number = number
        self.arrival = arrival
        self.prompt, self.output = arrival.lengths.prompt, arrival.lengths.output
        self.first_token = 0.0
        self.tokens = self.prompt + 1  # of its context, once it is decoded
        self.release: Callable[[], None] = lambda: None  # frees the prompt's pages
        # When the prefill worker's step in progress ends.
        self.source_free: Callable[[], float] = lambda: 0.0


class _PrefillQueue:
    """A prefill worker and its queue."""

    def __init__(
        self,
        clock: _Clock,
        worker: PrefillWorker,
        on_first_token: "Callable[[_Job], None]",
        served: dict[int, Served],
    ) -> None:
        self._clock, self._worker, self._served = clock, worker, served
        self._on_first_token = on_first_token
        self._pipeline = _Pipeline(worker.stages)
        self._queue = deque[_Job]()
        self._held_pages = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, job: _Job) -> None:
        self._queue.append(job)
        self._start()

    def _start(self) -> None:
        """Start the next batch, if the first stage is free."""
        if not self._queue or self._pipeline.next_entry > self._clock.now:
            return
        worker = self._worker
        heads = [job.prompt for _, job in zip(range(worker.max_batch), self._queue, strict=False)]
        batch = [
            self._queue.popleft() for _ in range(prefill_batch(worker, heads, self._held_pages))
        ]
        if not batch:
            return  # until a prompt is pulled
        for job in batch:
            self._hold(job)
        seconds = worker.seconds_per_stage([job.prompt for job in batch])
        done = self._pipeline.enter(self._clock.now, seconds)
        self._clock.at(self._pipeline.next_entry, self._start)
        self._clock.at(done, lambda: self._finish(batch))

    def _hold(self, job: _Job) -> None:
        pages = self._worker.pool.pages_of(job.prompt)
        self._held_pages += pages

        def release() -> None:
            self._held_pages -= pages
            self._start()

        job.release = release
        job.source_free = lambda: self._pipeline.next_entry

    def _finish(self, batch: Sequence[_Job]) -> None:
        for job in batch:
            job.first_token = self._clock.now
            if job.output == 1:  # never moves
                self._served[job.number] = Served(job.arrival, self._clock.now, self._clock.now)
                job.release()
            else:
                self._on_first_token(job)


class _DecodeQueue:
    """A decode worker and the requests that are assigned to it."""

    def __init__(
        self,
        clock: _Clock,
        worker: DecodeWorker,
        transfer: Transfer,
        served: dict[int, Served],
    ) -> None:
        self._clock, self._worker, self._served = clock, worker, served
        self._transfer = transfer
        self._pipeline = _Pipeline(worker.stages)
        self._bridge = deque[_Job]()  # not yet pulled
        self._waiting = deque[_Job]()
        self._swapped = deque[_Job]()
        self._batches: list[list[_Job]] = [[] for _ in range(worker.stages)]
        self._in_flight = [False] * worker.stages
        self._turn = 0
        self._pulled_pages = 0
        self._link_free = 0.0
        self.requests = 0

    def offer(self, job: _Job) -> None:
        """Take on a request whose KV is to be pulled."""
        self.requests += 1
        self._bridge.append(job)
        self._pull()

    def _pull(self) -> None:
        """Pull what there is room for, in order."""
        pool = self._worker.pool
        while self._bridge:
            job = self._bridge[0]
            free = pool.pages - self._running_pages() - self._pulled_pages
            if not self._worker.pulls(job.prompt, self._pulled_pages, free):
                return
            self._bridge.popleft()
            self._pulled_pages += self._worker.pulled_pages(job.prompt)
            start = max(self._clock.now, self._link_free)
            if self._transfer.between_steps:
                start = max(start, job.source_free())
            self._link_free = start + self._transfer.seconds(job.prompt)
            self._clock.at(self._link_free, partial(self._arrive, job))

    def _arrive(self, job: _Job) -> None:
        job.release()
        self._waiting.append(job)
        self._step()

    def _running_pages(self, but: int = -1) -> int:
        """Pages of the batches in their next steps, all but one of them."""
        pages_of = self._worker.pool.pages_of
        return sum(
            pages_of(job.tokens + 1)
            for number, batch in enumerate(self._batches)
            if number != but
            for job in batch
        )

    def _step(self) -> None:
        """Start the step of the batch whose turn it is, if the first stage is free."""
        if self._pipeline.next_entry > self._clock.now:
            return
        for _ in self._batches:
            number = self._turn
            self._turn = (number + 1) % len(self._batches)
            if not self._in_flight[number] and self._start(number):
                return

    def _start(self, number: int) -> bool:
        """Plan a batch's step and start it; return whether there is anything to do."""
        batch, worker = self._batches[number], self._worker
        if self._plan(number) and not batch:
            self._plan(number)
        if not batch:
            return False
        seconds = worker.seconds_per_stage(len(batch), sum(job.tokens for job in batch))
        self._in_flight[number] = True
        done = self._pipeline.enter(self._clock.now, seconds)
        self._clock.at(done, lambda: self._finish(number))
        if worker.stages > 1:
            self._clock.at(self._pipeline.next_entry, self._step)
        return True

    def _plan(self, number: int) -> bool:
        """Swap sequences of a batch out and in, and admit what was pulled.

        Returns:
            Whether any were swapped out.
        """
        batch = self._batches[number]
        step = plan_decode_step(
            self._worker,
            [job.tokens for job in batch],
            self._running_pages(but=number),
            [job.tokens for job in self._swapped],
            [job.prompt for job in self._waiting],
            self._pulled_pages,
        )
        for _ in range(step.swapped_out):
            self._swapped.appendleft(batch.pop())
        batch += [self._swapped.popleft() for _ in range(step.swapped_in)]
        for _ in range(step.admitted):
            job = self._waiting.popleft()
            self._pulled_pages -= self._worker.pulled_pages(job.prompt)
            batch.append(job)
        return bool(step.swapped_out)

    def _finish(self, number: int) -> None:
        """End a step: every sequence of its batch has one more token."""
        self._in_flight[number] = False
        now, batch = self._clock.now, self._batches[number]
        for job in batch:
            job.tokens += 1
            if job.tokens - job.prompt == job.output:
                self._served[job.number] = Served(job.arrival, job.first_token, now)
                self.requests -= 1
        batch[:] = [job for job in batch if job.tokens - job.prompt < job.output]
        self._pull()
        self._step()
