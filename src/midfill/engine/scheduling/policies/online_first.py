"""OnlineFirst: offline requests run while no other request does, and leave at once when one comes.

Source: Qiao et al., "ConServe: Fine-Grained GPU Harvesting for LLM Online and Offline Co-Serving",
2024, arXiv 2410.01228. Its offline requests use what online ones leave of a device, and are
preempted amid a pass, between two layers, when these need it. Here all offline requests leave as
soon as an online one arrives: the engine gives their pass up (``Engine.interrupted``). ConServe
also runs both in one step as latency allows; here that is done for one sequence that has waited
long, so that a server that never pauses answers its batches, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from midfill.engine.scheduling.scheduler import (
    RunningSequence,
    SchedulerPolicy,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)


@dataclass(frozen=True)
class OnlineFirst:
    """Has another policy plan either online requests and background prompts, or offline requests.

    What a preempted offline request has computed stays cached, so it goes on with its last token. A
    step that preempts runs nothing else: it takes no time, and the next one finds the slots free.

    Attributes:
        ordinary: plans the steps.
        max_rows: maximum number of rows of a step with offline prompts, since a request that
            arrives meanwhile waits for its end; None leaves it to the policy. How long steps take
            does not matter otherwise: nobody waits for them.
        max_wait: seconds. The first offline sequence that arrived longer ago is planned like an
            online one, before those that wait. So of the rows of a batch that its server keeps
            queued, each is answered after so long at the latest, one at a time.
    """

    ordinary: SchedulerPolicy
    max_rows: int | None = None
    max_wait: float = 60.0

    def __post_init__(self) -> None:
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError("max_rows must be at least 1")
        if not self.max_wait > 0:
            raise ValueError("max_wait must be above 0")

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        late = self._late(state)
        offline = [each.sequence_id for each in state.running if each.hints.offline]
        waiting = tuple(each for each in state.waiting if not each.hints.offline)
        if not waiting and not state.background and len(offline) == len(state.running):
            return self.ordinary.plan(replace(state, max_rows=self.max_rows))
        if leaving := tuple(each for each in reversed(offline) if each != late):
            return StepPlan(preempt=leaving)
        first = tuple(each for each in state.waiting if each.sequence_id == late)
        return self.ordinary.plan(replace(state, waiting=first + waiting))

    def _late(self, state: ScheduleState) -> int | None:
        """Return the first offline sequence if it has waited for too long."""
        sequences: Iterable[RunningSequence | WaitingSequence]
        sequences = chain(state.running, state.waiting)
        offline = [(each.arrived, each.sequence_id) for each in sequences if each.hints.offline]
        arrived, sequence_id = min(offline, default=(state.now, None))
        return sequence_id if state.now - arrived > self.max_wait else None
