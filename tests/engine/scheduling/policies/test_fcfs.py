"""FirstComeFirstServed is the order in which sequences have arrived."""

from schedule_states import CacheFacts

from midfill.engine.scheduling.policies.fcfs import FirstComeFirstServed
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import Hints, ScheduleState, WaitingSequence


def test_only_arrival_counts() -> None:
    queue = (
        WaitingSequence(3, 5, arrived=3.0, hints=Hints(priority=-9)),
        WaitingSequence(1, 90, arrived=1.0),
        WaitingSequence(2, 7, arrived=2.0, hints=Hints(deadline=0.1)),
    )
    policy = OrderedAdmission(SarathiServe(), FirstComeFirstServed())
    plan = policy.plan(ScheduleState((), queue, 10_000, CacheFacts(), now=3.0))
    assert [chunk.sequence_id for chunk in plan.admit] == [1, 2, 3]
