"""An event simulation of many replicas: what routing keeps of the cache, and how it spreads load.

What is assumed:

* A request of a document costs the tokens that are new since the version that its replica holds, or
  its whole prompt if the replica holds none. Replicas evict whole documents, least recently used
  first.
* A replica shares its time among its requests. A prompt takes a fixed time per token. A decoded
  token takes a fixed time alone; decoding beside others, a request weighs ``decode_weight`` of one
  that is prefilled, since a step of several rows costs little more than one of one row. So all run
  at the speed ``1 / max(1, sum of weights)``.
* A user waits for the answer, thinks, and asks again.
* At the beginning, the replica that a document belongs to holds it, unless its first request is new
  as a whole.
* Documents are placed as by ``midfill.engine.routing``, with a faster hash in place of BLAKE2, by
  the loads of this instant. A real router knows them some milliseconds late.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

import msgspec

from benchmarks.replicas.placement import Placement, first_fit
from benchmarks.replicas.population import Step
from midfill.config import RouterName
from midfill.engine.routing import DEFAULT_SLOTS


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's work costs; measured.

    Attributes:
        prefill_seconds: per token of a prompt.
        decode_seconds: per token of an answer that is decoded alone.
        decode_weight: of a request that decodes, beside others; one that is prefilled weighs 1.
    """

    prefill_seconds: float
    decode_seconds: float
    decode_weight: float


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came out.

    Attributes:
        replicas: how many, at the beginning.
        users: how many.
        router: how requests were distributed.
        slots: how many requests at a replica were no overload.
        requests: how many were answered.
        hit_rate: share of the prompts' tokens that was cached.
        first_p50, first_p95: seconds until the first token.
        imbalance: the busiest replica's working time, over the mean.
        spilled: share of requests that went to another replica than their document's own.
        utilisation: mean share of the time in which replicas worked.
        seconds: until the last answer's end, simulated.
    """

    replicas: int
    users: int
    router: RouterName
    slots: int
    requests: int
    hit_rate: float
    first_p50: float
    first_p95: float
    imbalance: float
    spilled: float
    utilisation: float
    seconds: float


@dataclass(slots=True)
class _Replica:
    """One replica: what it holds and what it works on.

    Attributes:
        held: by document, the tokens computed up to the version that it holds, and its size.
        held_tokens: of all documents.
        clock: the work that each of its requests has got since the beginning.
        at: until when that is counted.
        weight: of the requests that it works on.
        jobs: heap of (clock at its end, number, request).
        busy: seconds in which it worked.
        turn: changes whenever its next event does.
    """

    held: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    held_tokens: int = 0
    clock: float = 0.0
    at: float = 0.0
    weight: float = 0.0
    jobs: list[tuple[float, int, "_Job"]] = field(default_factory=list)
    busy: float = 0.0
    turn: int = 0

    def advance(self, now: float) -> None:
        """Count the work until now."""
        if self.jobs:
            self.clock += (now - self.at) / max(1.0, self.weight)
            self.busy += now - self.at
        self.at = now

    def compute(self, step: Step, total: int, capacity: int) -> int:
        """Return how many of a prompt's tokens are computed; the replica holds it from now on."""
        known, size = self.held.pop(step.document, (None, 0))
        computed = step.prompt if known is None else min(step.prompt, total - known)
        self.held_tokens += step.prompt - size
        self.held[step.document] = total, step.prompt
        while self.held_tokens > capacity and len(self.held) > 1:
            self.held_tokens -= self.held.popitem(last=False)[1][1]
        return max(1, computed)


@dataclass(slots=True)
class _Job:
    """A request at a replica."""

    user: int
    replica: int
    asked: float
    decoding: bool = False


class Simulation:
    """One run.

    Args:
        sessions: each user's requests, in order.
        costs: of the engine's work.
        replicas: how many.
        router: how requests are distributed.
        capacity: tokens that a replica's cache holds.
        output_tokens: of each answer.
        think_seconds: mean pause of a user.
        warm_up: how many of each user's first requests are not counted.
        slots: up to as many requests at a replica are no overload.
    """

    def __init__(
        self,
        sessions: Sequence[Sequence[Step]],
        costs: StepCosts,
        *,
        replicas: int,
        router: RouterName = "document",
        capacity: int = 10**9,
        output_tokens: int = 16,
        think_seconds: float = 0.0,
        warm_up: int = 0,
        slots: int = DEFAULT_SLOTS,
    ) -> None:
        self._sessions = sessions
        self._costs = costs
        self._router: RouterName = router
        self._capacity = capacity
        self._output_tokens = output_tokens
        self._think_seconds = think_seconds
        self._warm_up = warm_up
        self._slots = slots
        self._replicas = [_Replica() for _ in range(replicas)]
        self._placement = Placement(range(replicas))
        self._running = [0] * replicas
        self._turn = itertools.count()
        self._numbers = itertools.count()
        self._totals: dict[int, int] = {}  # tokens computed up to each document's last version
        self._next = [0] * len(sessions)
        self._events: list[tuple[float, int, int, int]] = []  # time, number, replica or -1, what
        self._first: list[float] = []
        self._prompt_tokens = self._computed_tokens = self._spilled = 0

    def run(self) -> SimulationResult:
        """Return what comes out."""
        self._place()
        for user, steps in enumerate(self._sessions):
            if steps:
                self._push(steps[0].think * self._think_seconds, -1, user)
        now = 0.0
        while self._events:
            now, _, replica, what = heapq.heappop(self._events)
            if replica < 0:
                self._ask(now, what)
            elif what == self._replicas[replica].turn:
                self._finish(now, replica)
        busy = [each.busy for each in self._replicas]
        cuts = quantiles(self._first, n=20) if len(self._first) > 1 else self._first * 19
        mean = sum(busy) / len(busy)
        return SimulationResult(
            replicas=len(self._replicas),
            users=len(self._sessions),
            router=self._router,
            slots=self._slots,
            requests=len(self._first),
            hit_rate=1 - self._computed_tokens / max(1, self._prompt_tokens),
            first_p50=cuts[9],
            first_p95=cuts[18],
            imbalance=max(busy) / mean if mean else 1.0,
            spilled=self._spilled / max(1, len(self._first)),
            utilisation=mean / now if now else 0.0,
            seconds=now,
        )

    def _place(self) -> None:
        """Have replicas hold the documents that are theirs."""
        seen = set[int]()
        for steps in self._sessions:
            for step in steps:
                if step.document not in seen and step.new < step.prompt:
                    home = self._replicas[self._placement.ranked(step.document)[0]]
                    home.compute(step, 0, self._capacity)
                seen.add(step.document)

    def _push(self, time: float, replica: int, what: int) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), replica, what))

    def _ask(self, now: float, user: int) -> None:
        """Send a user's next request."""
        step = self._sessions[user][self._next[user]]
        number = self._choose(step.document)
        counted = self._next[user] >= self._warm_up
        if counted and self._router == "document":
            self._spilled += number != self._placement.ranked(step.document)[0]
        replica = self._replicas[number]
        replica.advance(now)
        total = self._totals.get(step.document, 0) + step.new
        self._totals[step.document] = total
        computed = replica.compute(step, total, self._capacity)
        if counted:
            self._prompt_tokens += step.prompt
            self._computed_tokens += computed
        self._running[number] += 1
        replica.weight += 1
        end = replica.clock + computed * self._costs.prefill_seconds
        heapq.heappush(replica.jobs, (end, next(self._numbers), _Job(user, number, now)))
        self._schedule(now, number)

    def _finish(self, now: float, number: int) -> None:
        """End the prefill or the answer that a replica is done with."""
        replica = self._replicas[number]
        replica.advance(now)
        end, _, job = heapq.heappop(replica.jobs)
        replica.clock = end  # rounding apart, it is
        if job.decoding:
            replica.weight -= self._costs.decode_weight
            self._running[number] -= 1
            self._ask_again(now, job.user)
        else:
            if self._next[job.user] >= self._warm_up:
                self._first.append(now - job.asked)
            job.decoding = True
            replica.weight += self._costs.decode_weight - 1
            end = replica.clock + self._output_tokens * self._costs.decode_seconds
            heapq.heappush(replica.jobs, (end, next(self._numbers), job))
        self._schedule(now, number)

    def _ask_again(self, now: float, user: int) -> None:
        self._next[user] += 1
        if self._next[user] < len(self._sessions[user]):
            think = self._sessions[user][self._next[user]].think * self._think_seconds
            self._push(now + think, -1, user)

    def _schedule(self, now: float, number: int) -> None:
        """Have a replica's next event happen when it is due; an earlier plan is void."""
        replica = self._replicas[number]
        replica.turn += 1
        if replica.jobs:
            left = max(0.0, replica.jobs[0][0] - replica.clock)
            self._push(now + left * max(1.0, replica.weight), number, replica.turn)

    def _choose(self, document: int) -> int:
        """Return the replica for a document's next request."""
        if self._router == "round-robin":
            return next(self._turn) % len(self._replicas)
        ranked = self._placement.ranked(document)
        return first_fit(ranked, self._running, self._slots)
