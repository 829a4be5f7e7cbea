"""IterationLevel: whole prompts in one step with the decodes.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
OSDI 2022, section 3: requests join and leave the batch between two iterations, and a new request's
whole prompt runs in the iteration in which it joins. A baseline: Sarathi-Serve is this with chunks.
"""

from dataclasses import dataclass

from midfill.engine.scheduling.policies.prefill_first import WholePrompts
from midfill.engine.scheduling.scheduler import ScheduleState, StepPlan


@dataclass(frozen=True)
class IterationLevel(WholePrompts):
    """Runs all decodes in every step and, beside them, prompts as a whole.

    No decode is left out of a step, but a step takes as long as its prompts do.
    """

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        decodes, victims, available = self.place_decodes(state)
        chunks = tuple(
            chunk for chunk in self.whole_chunks(state) if chunk.sequence_id not in victims
        )
        if victims or chunks:
            return StepPlan(tuple(victims), tuple(decodes), chunks)
        admit = self.admit_whole(state, available, len(decodes))
        return StepPlan(decodes=tuple(decodes), admit=admit)
