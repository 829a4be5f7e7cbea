"""RequestLevel: one batch of requests at a time, from its prompts to the end of its last answer.

Source: the batching of FasterTransformer and of servers in front of it, which Yu et al., OSDI 2022
(Orca), section 2, call request-level scheduling and Agrawal et al., OSDI 2024, arXiv 2403.02310,
section 3.1, decode-prioritising. A baseline: answers never stall, and the batch shrinks until its
longest answer ends while all others wait.
"""

from dataclasses import dataclass

from midfill.engine.scheduling.policies.prefill_first import WholePrompts
from midfill.engine.scheduling.scheduler import ScheduleState, StepPlan


@dataclass(frozen=True)
class RequestLevel(WholePrompts):
    """Admits requests only when none runs, as many as fit; first come, first served.

    Unlike FasterTransformer, it pads nothing: rows of prompts of any lengths share a step.
    """

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        chunks = self.whole_chunks(state)
        if chunks:
            return StepPlan(chunks=chunks)
        if not state.running:
            return StepPlan(admit=self.admit_whole(state, state.available_slots, 0))
        decodes, victims, _ = self.place_decodes(state)
        return StepPlan(tuple(victims), tuple(decodes))
