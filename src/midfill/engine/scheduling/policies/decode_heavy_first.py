"""DecodeHeavyFirst: long answers to short prompts first.

Source: Zheng et al., "BatchLLM: Optimizing Large Batched LLM Inference with Global Prefix Sharing
and Throughput-oriented Token Batching", 2024, arXiv 2412.03594, its reordering by the ratio of
decode to prompt tokens, descending: answers that take many steps begin early, and the prompts that
come later run beside them, so fewer steps are left in which only a few answers decode.
"""

from dataclasses import dataclass

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence


@dataclass(frozen=True)
class DecodeHeavyFirst(QueueOrder):
    """Ranks by expected answer tokens per prompt token to compute, the most first.

    Cached tokens don't count: a prefix that several requests share is computed once.

    Attributes:
        expected_tokens: of answers whose clients don't say how long they will be.
    """

    expected_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expected_tokens < 1:
            raise ValueError("expected_tokens must be at least 1")

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        expected = sequence.hints.expected_tokens or self.expected_tokens
        cached = state.cache.cached_prefix(sequence.sequence_id).tokens
        return (-expected / max(sequence.length - cached, 1),)
