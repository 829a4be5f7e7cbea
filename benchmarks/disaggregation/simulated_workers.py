"""The simulator's workers: what happens at which time in a prefill and in a decode worker.

They decide by the functions of ``workers``, as real ones do. Steps take what the fitted latency
models say. A transfer takes a time by token, one prompt at a time per decode worker; for a part of
it the prefill worker copies, and computes nothing. Swapping to host memory takes no time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from benchmarks.disaggregation.latency import DecodeLatency, PrefillLatency
from benchmarks.disaggregation.workload import Arrival, Served
from midfill.engine.disaggregated.workers import DecodeLimits, PrefillLimits, prefill_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorker(PrefillLimits):
    """A prefill worker, with how long it takes.

    Attributes:
        latency: of a batch on all of its devices, if its layers are not in stages.
        stages: of its pipeline.
        stage_seconds: what each stage adds, if there are several.
    """

    latency: PrefillLatency
    stages: int = 1
    stage_seconds: float = 0.001

    def seconds_per_stage(self, prompts: Sequence[int]) -> float:
        """Return how long a batch of prompts of these lengths occupies one stage."""
        whole = self.latency.seconds(prompts)
        return whole / self.stages + self.stage_seconds if self.stages > 1 else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorker(DecodeLimits):
    """A decode worker, with how long it takes.

    Attributes:
        latency: of a step on all of its devices, if its layers are not in stages.
        stages: of its pipeline; it has as many batches, which take turns.
    """

    latency: DecodeLatency
    stages: int = 1

    def seconds_per_stage(self, sequences: int, context_tokens: int) -> float:
        """Return how long a step occupies one stage."""
        return self.latency.seconds(sequences, context_tokens) / self.stages


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The next step of one of a decode worker's batches, as numbers of sequences.

    Attributes:
        swapped_out: from the batch's end, to host memory.
        swapped_in: from the head of those in host memory.
        admitted: from the head of those that were pulled.
    """

    swapped_out: int
    swapped_in: int
    admitted: int


def plan_decode_step(
    worker: DecodeLimits,
    batch: Sequence[int],
    other_pages: int,
    swapped: Sequence[int],
    waiting: Sequence[int],
    pulled_pages: int,
) -> DecodeStep:
    """Plan a step.

    Args:
        worker: which runs it.
        batch: tokens of the contexts of the batch whose turn it is.
        other_pages: held by the worker's other batches, one more token for each included.
        swapped: tokens of the contexts in host memory, first those that come back first.
        waiting: tokens of the prompts that were pulled.
        pulled_pages: held by these, and by prompts on their way (``DecodeWorker.pulled_pages``).
    """
    pool = worker.pool
    needed = [pool.pages_of(tokens + 1) for tokens in batch]
    kept = len(batch)
    while kept and sum(needed[:kept]) + other_pages + pulled_pages > pool.pages:
        kept -= 1
    if kept < len(batch):
        return DecodeStep(len(batch) - kept, 0, 0)
    pages = sum(needed) + other_pages + pulled_pages
    count, context_tokens = len(batch), sum(batch)

    def fits(tokens: int, further_pages: int) -> bool:
        return (
            count < worker.max_batch
            and context_tokens + tokens <= worker.max_batch_tokens
            and pages + further_pages <= pool.pages
        )

    swapped_in = admitted = 0
    for tokens in swapped:
        if not fits(tokens, further := pool.pages_of(tokens + 1)):
            break
        count, context_tokens, pages = count + 1, context_tokens + tokens, pages + further
        swapped_in += 1
    # Those in host memory come first, unless nothing would run before something else has.
    if swapped_in == len(swapped) or not (count or other_pages):
        for prompt in waiting:
            if not fits(prompt + 1, 0):
                break
            count, context_tokens = count + 1, context_tokens + prompt + 1
            admitted += 1
    return DecodeStep(0, swapped_in, admitted)


@dataclass(frozen=True, slots=True)
class Transfer:
    """How KV goes from a prefill to a decode worker.

    Attributes:
        seconds_per_token: of a prompt.
        constant: seconds of each pull.
        read_share: part of this time for which the prefill worker itself copies: before its next
            batch if the KV is pulled at once, otherwise after the step in progress.
    """

    seconds_per_token: float = 0.0
    constant: float = 0.0
    read_share: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Return the seconds that a prompt's KV takes."""
        return self.constant + self.seconds_per_token * tokens


class Clock:
    """What happens when; ``now`` is the time of what happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something happen; what is told first comes first of what happens together."""
        heapq.heappush(self._events, (seconds, next(self._numbers), action))

    def run(self) -> None:
        """Let time pass until nothing more happens."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


class Pipeline:
    """Stages that one batch after another goes through."""

    def __init__(self, stages: int) -> None:
        self._free = [0.0] * stages

    @property
    def next_entry(self) -> float:
        """When the first stage is free."""
        return self._free[0]

    def hold(self, now: float, seconds: float) -> float:
        """Keep the first stage busy for so long, once it is free; return when it is again."""
        self._free[0] = max(now, self._free[0]) + seconds
        return self._free[0]

    def enter(self, now: float, seconds: float) -> float:
        """Send in a batch that takes so long in each stage; return when it leaves the last one."""
        for stage, free in enumerate(self._free):
            now = max(now, free) + seconds
            self._free[stage] = now
        return now


class Job:
    """A request in the simulation."""

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.number = number
        self.arrival = arrival
        self.prompt, self.output = arrival.lengths.prompt, arrival.lengths.output
        self.first_token = 0.0
        self.tokens = self.prompt + 1  # of its context, once it is decoded
        self.release: Callable[[], None] = lambda: None  # frees the prompt's pages
        # Has the prefill worker copy the KV for so long; returns when it begins.
        self.read: Callable[[float], float] = lambda _: 0.0


class SimulatedPrefill:
    """A prefill worker and its queue."""

    def __init__(
        self,
        clock: Clock,
        worker: PrefillWorker,
        on_first_token: Callable[[Job], None],
        served: dict[int, Served],
    ) -> None:
        self._clock, self._worker, self._served = clock, worker, served
        self._on_first_token = on_first_token
        self._pipeline = Pipeline(worker.stages)
        self._queue = deque[Job]()
        self._held_pages = 0
        self.busy = 0.0  # seconds

    @property
    def queued(self) -> int:
        """Prompts that have not started."""
        return len(self._queue)

    def submit(self, job: Job) -> None:
        """Take on a request."""
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
        self.busy += seconds
        self._clock.at(done, lambda: self._finish(batch))
        self._clock.at(self._pipeline.next_entry, self._start)

    def _hold(self, job: Job) -> None:
        pages = self._worker.pool.pages_of(job.prompt)
        self._held_pages += pages

        def release() -> None:
            self._held_pages -= pages
            self._start()

        def read(seconds: float) -> float:
            end = self._pipeline.hold(self._clock.now, seconds)
            self._clock.at(end, self._start)
            return end - seconds

        job.release, job.read = release, read

    def _finish(self, batch: Sequence[Job]) -> None:
        for job in batch:
            job.first_token = self._clock.now
            if job.output == 1:  # never moves
                self._served[job.number] = Served(job.arrival, self._clock.now, self._clock.now)
                job.release()
            else:
                self._on_first_token(job)


class SimulatedDecode:
    """A decode worker and the requests that are assigned to it."""

    def __init__(
        self,
        clock: Clock,
        worker: DecodeWorker,
        transfer: Transfer,
        served: dict[int, Served],
    ) -> None:
        self._clock, self._worker, self._served = clock, worker, served
        self._transfer = transfer
        self._pipeline = Pipeline(worker.stages)
        self._bridge = deque[Job]()  # not yet pulled
        self._waiting = deque[Job]()
        self._swapped = deque[Job]()
        self._batches: list[list[Job]] = [[] for _ in range(worker.stages)]
        self._in_flight = [False] * worker.stages
        self._turn = 0
        self._pulled_pages = 0
        self._link_free = 0.0
        self.requests = 0
        self.busy = 0.0  # seconds

    def offer(self, job: Job) -> None:
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
            start, seconds = (
                max(self._clock.now, self._link_free),
                self._transfer.seconds(job.prompt),
            )
            if self._transfer.read_share:
                start = max(start, job.read(self._transfer.read_share * seconds))
            self._link_free = start + seconds
            self._clock.at(self._link_free, partial(self._arrive, job))

    def _arrive(self, job: Job) -> None:
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
        self.busy += seconds
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
