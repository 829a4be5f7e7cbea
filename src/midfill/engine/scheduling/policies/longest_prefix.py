"""LongestPrefixMatch: the prompt with the most cached tokens first.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS
2024, arXiv 2312.07104, section 3: cache-aware scheduling sorts the waiting requests by the length
of their cached prefix, which visits the radix tree depth first where all requests are there from
the start (theorem 3.1). It may starve the others, which ``max_wait`` prevents.
"""

from dataclasses import dataclass

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence


@dataclass(frozen=True)
class LongestPrefixMatch(QueueOrder):
    """Ranks by the number of cached tokens, the most first.

    Requests of one document, or with one system prompt, then follow each other while its KV is
    there, instead of evicting each other's. A prompt that shares a long beginning with one that is
    being computed waits for it anyway (``SarathiServe.min_shared_prefix``).
    """

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        return (-state.cache.cached_prefix(sequence.sequence_id).tokens,)
