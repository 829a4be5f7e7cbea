"""EarliestDeadlineFirst: the request whose client gives up first comes first.

Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
Environment", Journal of the ACM 1973, section 7: on one processor, the order of deadlines meets all
deadlines that any order can meet.
"""

from dataclasses import dataclass

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.scheduler import RunningSequence, ScheduleState, WaitingSequence


@dataclass(frozen=True)
class EarliestDeadlineFirst(QueueOrder):
    """Ranks by deadline, the earliest first; requests without one come last.

    A request whose deadline has passed is not ranked at all: the engine ends it before a step is
    planned. One that names an early deadline in order to overtake others is ended by it, too.
    """

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        return (sequence.hints.deadline,)

    def rank_running(self, state: ScheduleState, sequence: RunningSequence) -> Rank:
        """Return a running sequence's rank."""
        return (sequence.hints.deadline,)
