"""Scheduling policies on a virtual clock: what an engine does with their plans, without a model.

Policies are told what steps cost where ``cost_is_known``; steps cost the same with any context.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from midfill.engine.scheduling.scheduler import (
    NO_HINTS,
    Hints,
    RunningSequence,
    SchedulerPolicy,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.kv.radix_cache import CachedPrefix

LAYERS = 6


@dataclass(frozen=True)
class Job:
    """A request of a simulation.

    Attributes:
        arrival: in seconds.
        prompt, answer: numbers of tokens, at least 1.
        cached: how many tokens of the prompt are cached; they take no slots.
    """

    arrival: float
    prompt: int
    answer: int = 1
    cached: int = 0
    tenant: str = ""
    hints: Hints = NO_HINTS


@dataclass
class Progress:
    """How far a job is."""

    job: Job
    sequence_id: int
    computed: int = 0
    generated: int = 0
    resumed: bool = False
    decoding: bool = False
    by_layers: bool = False
    layer_tokens: int = 0
    next_layer: int = 0
    token_times: list[float] = field(default_factory=list)
    preemptions: int = 0

    @property
    def length(self) -> int:
        return self.job.prompt + self.generated

    @property
    def owned(self) -> int:
        return max(self.length - (1 if self.decoding else 0) - self.job.cached, 0)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.job.arrival

    @property
    def gaps(self) -> list[float]:
        pairs = zip(self.token_times[:-1], self.token_times[1:], strict=True)
        return [later - earlier for earlier, later in pairs]


def linear_cost(rows: int) -> float:
    """Seconds of a step: reading the weights, and each row."""
    return 0.005 + 0.001 * rows


class Simulation:
    """Runs jobs under a policy; checks that every plan fits the pool and stalls nothing started.

    Attributes:
        plans: each step's state and plan.
        done: finished jobs, in order of their ends.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        slots: int = 10_000,
        max_running: int = 16,
        lookahead: int = 64,
        cost: Callable[[int], float] = linear_cost,
        cost_is_known: bool = False,
        common: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        self.policy, self.slots, self.max_running = policy, slots, max_running
        self.lookahead, self.cost = lookahead, cost
        self.cost_is_known = cost_is_known
        self.prefill_share: int | None = None
        self.common = common or {}
        self.now = 0.0
        self.plans: list[tuple[ScheduleState, StepPlan]] = []
        self.running: list[Progress] = []
        self.waiting: list[Progress] = []
        self.done: list[Progress] = []
        self._all: dict[int, Progress] = {}

    def run(self, jobs: Iterable[Job], until: float = math.inf) -> list[Progress]:
        """Run until all jobs are done, or for some time; return them in order of arrival."""
        later = sorted(jobs, key=lambda job: job.arrival)
        while (later or self.waiting or self.running) and self.now < until:
            if not self.waiting and not self.running:
                self.now = max(self.now, later[0].arrival)
            while later and later[0].arrival <= self.now:
                progress = Progress(later.pop(0), len(self._all))
                self._all[progress.sequence_id] = progress
                self.waiting.append(progress)
            state = self.state()
            plan = self.policy.plan(state)
            self.plans.append((state, plan))
            self.prefill_share = plan.prefill_share
            assert plan.rows or plan.preempt, f"nothing runs: {state}"
            self.now += self.cost(plan.rows)
            self.apply(plan)
        return list(self._all.values())

    @property
    def available(self) -> int:
        return self.slots - sum(each.owned for each in self.running)

    def state(self) -> ScheduleState:
        places = max(self.max_running - len(self.running), self.lookahead, 1)
        return ScheduleState(
            running=tuple(_running(each) for each in self.running),
            waiting=tuple(_waiting(each) for each in self.waiting[:places]),
            available_slots=self.available,
            cache=self,
            now=self.now,
            total_slots=self.slots,
            step_seconds=(lambda rows, keys: self.cost(rows)) if self.cost_is_known else None,
            prefill_share=self.prefill_share,
        )

    def cached_prefix(self, sequence_id: int) -> CachedPrefix:
        return CachedPrefix(self._all[sequence_id].job.cached, 0)

    def found_elsewhere(self, sequence_id: int) -> int:
        return 0

    def common_prefix(self, first: int, second: int) -> int:
        return self.common.get((first, second), 0)

    def released_by(self, victims: Sequence[int]) -> int:
        return sum(self._all[victim].owned for victim in victims)

    def apply(self, plan: StepPlan) -> None:
        for victim in plan.preempt:
            progress = self._all[victim]
            self.running.remove(progress)
            self.waiting.insert(0, progress)
            progress.computed, progress.resumed, progress.decoding = 0, True, False
            progress.by_layers, progress.layer_tokens, progress.next_layer = False, 0, 0
            progress.preemptions += 1
        for chunk in plan.admit:
            progress = self._all[chunk.sequence_id]
            self.waiting.remove(progress)
            self.running.append(progress)
            progress.computed, progress.by_layers = progress.job.cached, chunk.tokens == 0
        self.running.sort(key=lambda each: each.sequence_id)
        assert len(self.running) <= self.max_running
        for chunk in (*plan.chunks, *plan.admit):
            if chunk.tokens:
                self._compute(self._all[chunk.sequence_id], chunk.tokens)
        for part in plan.layer_chunks:
            progress = self._all[part.sequence_id]
            assert part.first == progress.next_layer
            progress.layer_tokens, progress.next_layer = part.tokens, part.end
            if part.end == LAYERS:
                progress.layer_tokens = progress.next_layer = 0
                self._compute(progress, part.tokens)
        for sequence_id in plan.decodes:
            assert self._all[sequence_id].decoding
            self._sample(self._all[sequence_id])
        assert self.available >= 0, "more slots are held than there are"

    def _compute(self, progress: Progress, tokens: int) -> None:
        assert 0 < tokens <= progress.length - progress.computed
        progress.computed += tokens
        if progress.computed == progress.length:
            progress.decoding = True
            self._sample(progress)

    def _sample(self, progress: Progress) -> None:
        progress.generated += 1
        progress.computed = progress.length - 1
        progress.token_times.append(self.now)
        if progress.generated == progress.job.answer:
            self.running.remove(progress)
            self.done.append(progress)


def _running(progress: Progress) -> RunningSequence:
    return RunningSequence(
        progress.sequence_id, progress.length, progress.computed, progress.decoding,
        progress.by_layers, False, progress.layer_tokens, progress.next_layer, 0,
        progress.job.arrival, progress.job.hints,
    )  # fmt: skip


def _waiting(progress: Progress) -> WaitingSequence:
    return WaitingSequence(
        progress.sequence_id, progress.length, "chunks" if progress.resumed else "any", 0, None,
        progress.job.tenant, progress.job.arrival, progress.resumed, progress.job.hints,
    )  # fmt: skip


def mean_ttft(jobs: Sequence[Progress]) -> float:
    return sum(job.ttft for job in jobs) / len(jobs)
