"""IdlePrefill: background prompts run when nothing else is there; any other policy does the rest.

A background prompt holds no slots between two steps: what it has computed lies in the cache, open
to eviction like everything there, and it goes on from what it finds. So it need not be preempted
for an ordinary request, whose plan is the same as if no background prompt existed.
"""

from dataclasses import dataclass, replace

from midfill.engine.scheduler import (
    Chunk,
    SchedulerPolicy,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)


@dataclass(frozen=True)
class IdlePrefill:
    """Prefill in idle time, first come, first served, a small chunk a step.

    Attributes:
        ordinary: plans the steps in which any sequence runs or waits.
        chunk: most background tokens a step: what an ordinary request waits for if it comes in
            the middle of one.
        most_waiting: background prompts kept; when there are more, the oldest are dropped. They
            guess what will be asked, and the newest guess knows most.
    """

    ordinary: SchedulerPolicy
    chunk: int = 64
    most_waiting: int = 64

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.most_waiting < 0:
            raise ValueError("chunk must be at least 1, most_waiting at least 0")

    def plan(self, state: ScheduleState) -> StepPlan:
        """Plan one step."""
        excess = max(len(state.background) - self.most_waiting, 0)
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
        """How many tokens to run; 0 if the whole prompt can't be held beside what is in use."""
        cached = state.cache.cached_prefix(sequence.sequence_id)
        missing = sequence.length - cached.tokens
        return 0 if cached.evictable + missing > state.available_slots else min(missing, self.chunk)
