"""FirstComeFirstServed: the order of arrival.

Source: the order of vLLM's ``--scheduling-policy fcfs`` (Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention", SOSP 2023, arXiv 2309.06180, section 4.5) and
of Sarathi-Serve. The baseline for every other order.
"""

from dataclasses import dataclass

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence


@dataclass(frozen=True)
class FirstComeFirstServed(QueueOrder):
    """Ranks all sequences equal, so that only their arrival counts."""

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        return ()
