"""Continuum: keep a program's KV while its tool runs, for a time that pays.

Source: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache
Time-to-Live", 2025, arXiv 2511.02230. A program is a chain of requests, each of which continues the
last one's text after a tool was called. Requests are served in the order in which their programs
arrived, and the KV of a finished turn is pinned for a time to live tau that maximises
P(tool returns within tau) * benefit - tau.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.programs import FinishedTurn
from midfill.engine.scheduling.scheduler import (
    Pin,
    ProgramId,
    RunningSequence,
    ScheduleState,
    WaitingSequence,
)


@dataclass(frozen=True)
class Continuum(QueueOrder):
    """First come, first served by program; those whose KV is pinned come first.

    Preempted requests come before both. The request whose program arrived last is preempted first.

    What differs: pins hold at most a share of the pool, and where slots are too few for the running
    answers, those of the latest programs are released before anything is preempted. The paper does
    so only where nothing runs.

    Attributes:
        min_samples: how many durations of a tool have to be known, or of all tools, to believe in
            them; fewer count as if they were exponential with a mean of one second.
        threshold: seconds; above 0 it replaces the model by a rule: tools that take no longer on
            average have their KV kept for so long, and others not at all. The authors' published
            code does that with 2.
        max_pinned: share of the KV pool that pins may hold.
    """

    min_samples: int = 100
    threshold: float = 0.0
    max_pinned: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_samples < 0 or not self.threshold >= 0 or not 0 < self.max_pinned <= 1:
            raise ValueError(
                "min_samples and threshold must be at least 0, max_pinned above 0 and at most 1"
            )

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        pinned = sequence.hints.program in state.pinned_programs
        return (not pinned, sequence.hints.program_arrived)

    def rank_running(self, state: ScheduleState, sequence: RunningSequence) -> Rank:
        """Return a running sequence's rank."""
        return (sequence.hints.program_arrived,)

    def time_to_live(self, turn: FinishedTurn) -> float:
        """Return for how many seconds a turn's KV is kept; 0 leaves it to the cache."""
        if not turn.tool:
            return 0.0
        if self.threshold:
            mean = sum(turn.tool_durations) / max(len(turn.tool_durations), 1)
            return self.threshold if mean <= self.threshold else 0.0
        for durations in (turn.tool_durations, turn.durations):
            if len(durations) > self.min_samples:
                return best_time_to_live(durations, turn.benefit)
        return cold_start_time_to_live(turn.benefit)

    def release(self, state: ScheduleState) -> tuple[ProgramId, ...]:
        """Return whose pins end now; a pure function, asked again until there are none.

        They are those that are due and whose follow-up doesn't wait already. Otherwise, as long as
        slots are missing, it is the pin of the program that arrived last.
        """
        due = [pin.program for pin in state.pins if pin.deadline <= state.now and not pin.awaited]
        if due:
            return tuple(due)
        if not state.pins or not self._lacks_slots(state):
            return ()
        latest = max(state.pins, key=_release_order)
        return (latest.program,)

    def _lacks_slots(self, state: ScheduleState) -> bool:
        """Whether decodes lack slots, or the queue's head does while nothing runs."""
        if state.running:
            return sum(each.decoding for each in state.running) > state.available_slots
        if not state.waiting:
            return False
        head = self.sort_queue(state)[0]
        return head.needs(state.cache.cached_prefix(head.sequence_id)) > state.available_slots


def best_time_to_live(durations: Sequence[float], benefit: float) -> float:
    """Return the tau >= 0 that maximises P(duration <= tau) * benefit - tau.

    The optimum is 0 or one of the durations: between two of them only the price grows. Of equally
    good ones it is the smallest.

    Args:
        durations: observed ones, ascending; at least one.
        benefit: seconds.
    """
    best = (bisect_right(durations, 0.0) / len(durations) * benefit, 0.0)
    for number, duration in enumerate(durations, 1):
        if number < len(durations) and durations[number] == duration:
            continue  # the last of equal ones counts them all
        value = number / len(durations) * benefit - duration
        if value > best[0]:
            best = (value, duration)
    return best[1]


def cold_start_time_to_live(benefit: float) -> float:
    """Return the best tau for durations that are exponential with a mean of one second."""
    return math.log(benefit) if benefit > 1.0 else 0.0


def _release_order(pin: Pin) -> tuple[bool, float]:
    """Return what is highest of the pin to release first: one that nobody waits for, the latest."""
    return (not pin.awaited, pin.program_arrived)
