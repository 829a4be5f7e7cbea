"""OrderedAdmission: decide which waiting sequence comes next, and leave batching to another policy.

A queue order ranks sequences; the policy below it, such as Sarathi-Serve, admits them from the
head of the queue and cuts them into chunks as ever. So every order goes with every way of batching.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from midfill.engine.scheduling.scheduler import (
    RunningSequence,
    SchedulerPolicy,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)

Rank = tuple[float, ...]
"""Of two sequences, the one with the lower rank comes first."""


@dataclass(frozen=True)
class QueueOrder(ABC):
    """Ranks the sequences of a tenant; ties come in order of arrival.

    Attributes:
        max_wait: seconds. A sequence that arrived longer ago comes before all others, in order of
            arrival, whatever its rank: so none waits for ever.
        resumes_first: whether preempted sequences come before new ones whatever their rank.
        ranks_offline: whether offline sequences are ranked, too. If not, they come in order of
            arrival: their file's order, which groups prompts that begin alike.
    """

    max_wait: float = 60.0
    resumes_first: ClassVar[bool] = True
    ranks_offline: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.max_wait > 0:
            raise ValueError("max_wait must be above 0")

    @abstractmethod
    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank; a pure function."""

    def rank_running(self, state: ScheduleState, sequence: RunningSequence) -> Rank:
        """Return a running sequence's rank: that with the highest is preempted first.

        By default all are equal, so the latest to arrive is.
        """
        return ()

    def age(self, state: ScheduleState, sequence: WaitingSequence | RunningSequence) -> float:
        """Return how long ago a sequence arrived, in seconds; never negative."""
        return max(state.now - sequence.arrived, 0.0)

    def sort_queue(self, state: ScheduleState) -> tuple[WaitingSequence, ...]:
        """Return the queue with each tenant's sequences in order, in the tenant's own places."""
        queue = state.waiting
        if len(queue) < 2:
            return queue

        def key(sequence: WaitingSequence) -> Rank:
            by_arrival = (sequence.arrived, sequence.sequence_id)
            if self.age(state, sequence) > self.max_wait:
                return (0, *by_arrival)
            if sequence.resumed and self.resumes_first:
                return (1, *by_arrival)
            if sequence.hints.offline and not self.ranks_offline:
                return (2, *by_arrival)
            return (2, *self.rank(state, sequence), *by_arrival)

        ranked = sorted(queue, key=key)
        if all(sequence.tenant == queue[0].tenant for sequence in queue):
            return tuple(ranked)
        by_tenant: dict[str, list[WaitingSequence]] = {}
        for sequence in reversed(ranked):
            by_tenant.setdefault(sequence.tenant, []).append(sequence)
        return tuple(by_tenant[sequence.tenant].pop() for sequence in queue)

    def sort_running(self, state: ScheduleState) -> tuple[RunningSequence, ...]:
        """Return what runs, with what is preempted first at the end."""
        if type(self).rank_running is QueueOrder.rank_running:
            return state.running

        def key(sequence: RunningSequence) -> Rank:
            by_arrival = (sequence.arrived, sequence.sequence_id)
            if self.age(state, sequence) > self.max_wait:
                return (0, *by_arrival)
            return (1, *self.rank_running(state, sequence), *by_arrival)

        return tuple(sorted(state.running, key=key))


@dataclass(frozen=True)
class OrderedAdmission:
    """Sorts the queue, and what runs, by a queue order before another policy plans the step.

    Tenants keep their turns (``DeficitRoundRobin``): each place in the queue stays its tenant's,
    and the order decides which of the tenant's own sequences takes it. So no tenant gains on
    another by what it says of its requests.

    Attributes:
        batching: plans the step. It takes waiting sequences from the queue's head, and preempts the
            last ones of those that run.
        order: ranks the sequences.
    """

    batching: SchedulerPolicy
    order: QueueOrder

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        return self.batching.plan(
            replace(
                state,
                waiting=self.order.sort_queue(state),
                running=self.order.sort_running(state),
            )
        )
