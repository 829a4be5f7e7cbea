"""ShortestPromptFirst: the shortest prompt first, with ageing.

Source: Shi et al., "Nexus: Proactive Intra-GPU Disaggregation of Prefill and Decode in LLM
Serving", 2025, arXiv 2507.06608, its scheduler of prefills: score = remaining prompt tokens - gamma
* age, lowest first. The paper's gamma is 15; it does not say the unit of age, here seconds.
"""

from dataclasses import dataclass
from typing import ClassVar

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence


@dataclass(frozen=True)
class ShortestPromptFirst(QueueOrder):
    """Ranks by the tokens that are left to compute; cached ones don't count.

    Mean time to first token falls since many short prompts don't wait for one that is long: most
    keystrokes find nearly all of their prompt cached, so they don't wait for those that don't. With
    ageing, a prompt of n more tokens than others is overtaken for at most n / ageing seconds.

    Attributes:
        ageing: tokens by which a sequence counts as shorter for each second that it has waited: the
            paper's gamma. 0 is plain shortest first, under which only ``max_wait`` keeps long
            prompts from waiting for ever.
    """

    ageing: float = 15.0
    ranks_offline: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ageing >= 0:
            raise ValueError("ageing must be at least 0")

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        cached = state.cache.cached_prefix(sequence.sequence_id).tokens
        return (sequence.length - cached - self.ageing * self.age(state, sequence),)
