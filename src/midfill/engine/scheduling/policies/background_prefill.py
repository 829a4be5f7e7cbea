"""BackgroundPrefill: compute background prompts while no other sequence runs or waits.

A background prompt holds no slots between two steps: what it has computed belongs to the cache,
evictable like everything there, and it continues from what it finds. So it need not be preempted
for an ordinary request, whose plan is the same as if no background prompt existed.
"""

from dataclasses import dataclass, replace

from midfill.engine.scheduling.scheduler import (
    Chunk,
    SchedulerPolicy,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)


@dataclass(frozen=True)
class BackgroundPrefill:
    """Prefills in idle time, first come, first served, a small chunk per step.

    Attributes:
        ordinary: plans the steps in which any sequence runs or waits.
        chunk: maximum background tokens per step, fewer where ``ScheduleState.max_rows`` says so.
            An ordinary request that arrives during such a step waits for it to end.
        max_waiting: maximum number of background prompts; beyond it the oldest are dropped. They
            are guesses at the next request, and the newest guess is the best informed.
    """

    ordinary: SchedulerPolicy
    chunk: int = 64
    max_waiting: int = 64

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.max_waiting < 0:
            raise ValueError("chunk must be at least 1, max_waiting at least 0")

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        excess = max(len(state.background) - self.max_waiting, 0)
        dropped = [sequence.sequence_id for sequence in state.background[:excess]]
        if state.running or state.waiting:
            plan = self.ordinary.plan(state)
            return replace(plan, drop=tuple(dropped)) if dropped else plan
        for sequence in state.background[excess:]:
            tokens = self._next_chunk(state, sequence)
            if tokens:
                chunk = Chunk(sequence.sequence_id, tokens)
                return StepPlan(drop=tuple(dropped), background=(chunk,))
            dropped.append(sequence.sequence_id)
        return StepPlan(drop=tuple(dropped))

    def _next_chunk(self, state: ScheduleState, sequence: WaitingSequence) -> int:
        """Return how many tokens to run; 0 if the prompt doesn't fit beside the slots in use."""
        cached = state.cache.cached_prefix(sequence.sequence_id)
        missing = sequence.length - cached.tokens
        if cached.evictable + missing > state.available_slots:
            return 0
        chunk = self.chunk if state.max_rows is None else min(self.chunk, state.max_rows)
        return min(missing, chunk)
