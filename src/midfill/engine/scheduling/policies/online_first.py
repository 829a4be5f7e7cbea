"""OnlineFirst: offline requests run while no other request does, and leave at once when one comes.

Source: Qiao et al., "ConServe: Fine-Grained GPU Harvesting for LLM Online and Offline Co-Serving",
2024, arXiv 2410.01228. Its offline requests use what online ones leave of a device, and are
preempted amid a pass, between two layers, when these need it. Here all offline requests leave as
soon as an online one arrives: the engine gives their pass up (``Engine.interrupted``). ConServe
also runs both in one step as latency allows; that is not done.
"""

from dataclasses import dataclass, replace

from midfill.engine.scheduling.scheduler import SchedulerPolicy, ScheduleState, StepPlan


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
    """

    ordinary: SchedulerPolicy
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError("max_rows must be at least 1")

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        offline = [each.sequence_id for each in state.running if each.hints.offline]
        waiting = tuple(each for each in state.waiting if not each.hints.offline)
        if waiting or state.background or len(offline) < len(state.running):
            if offline:
                return StepPlan(preempt=tuple(reversed(offline)))
            return self.ordinary.plan(replace(state, waiting=waiting))
        return self.ordinary.plan(replace(state, max_rows=self.max_rows))
