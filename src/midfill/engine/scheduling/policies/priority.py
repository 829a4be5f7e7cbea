"""PriorityOrder: the most important request first, as its client says.

Source: vLLM's ``--scheduling-policy priority``: the request field ``priority``, lower values first,
ties by arrival; the least important running request is preempted first. vLLM lets an unimportant
request starve; here ``max_wait`` does not.
"""

from dataclasses import dataclass
from typing import ClassVar

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.scheduler import RunningSequence, ScheduleState, WaitingSequence


@dataclass(frozen=True)
class PriorityOrder(QueueOrder):
    """Ranks by priority, the lowest value first.

    A preempted request has no precedence over a more important new one.
    """

    resumes_first: ClassVar[bool] = False

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        return (sequence.hints.priority, not sequence.resumed)

    def rank_running(self, state: ScheduleState, sequence: RunningSequence) -> Rank:
        """Return a running sequence's rank."""
        return (sequence.hints.priority,)
