"""HighestHitRate: the prompt of which the largest share is cached first, with ageing.

Source: Yang et al., "KVShare: An LLM Service System with Efficient and Effective Multi-Tenant KV
Cache Reuse", 2025, arXiv 2503.16525, its cache-aware scheduler: the queue by descending hit rate.
Unlike SGLang's order (``LongestPrefixMatch``), the share of a prompt counts and not the number of
tokens: a short prompt that is all cached comes before a long one with more cached tokens and more
to compute. What a method of reuse takes from elsewhere in the cache counts as well. The paper
leaves starvation open; ageing is an addition.
"""

from dataclasses import dataclass

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence


@dataclass(frozen=True)
class HighestHitRate(QueueOrder):
    """Ranks by hit rate, the highest first.

    Attributes:
        ageing: what a second of waiting adds to the hit rate. With 0.1, a prompt of which nothing
            is cached is overtaken for at most ten seconds.
    """

    ageing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ageing >= 0:
            raise ValueError("ageing must be at least 0")

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        cached = state.cache.cached_prefix(sequence.sequence_id).tokens
        cached += state.cache.found_elsewhere(sequence.sequence_id)
        return (-(cached / sequence.length + self.ageing * self.age(state, sequence)),)
