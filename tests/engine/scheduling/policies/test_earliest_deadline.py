"""EarliestDeadlineFirst meets deadlines that first come, first served misses."""

from math import inf

from step_simulation import Job, Simulation

from midfill.engine.scheduling.policies.earliest_deadline import EarliestDeadlineFirst
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import Hints

CHUNKED = SarathiServe(token_budget=64, max_running=1)
# Each takes about 0.25 s, one after the other; the later, the more urgent.
JOBS = [Job(0.0, 200, 2, hints=Hints(deadline=0.3 * (10 - n))) for n in range(10)]


def missed(policy: SarathiServe | OrderedAdmission) -> int:
    done = Simulation(policy, max_running=1).run(JOBS)
    return sum(each.token_times[0] > each.job.hints.deadline for each in done)


def test_it_meets_deadlines_that_an_order_of_arrival_misses() -> None:
    assert missed(CHUNKED) >= 4
    assert missed(OrderedAdmission(CHUNKED, EarliestDeadlineFirst())) == 0


def test_requests_without_a_deadline_come_last_in_order_of_arrival() -> None:
    jobs = [Job(0.0, 50), Job(0.0, 50), Job(0.0, 50, hints=Hints(deadline=9.0))]
    assert jobs[0].hints.deadline == inf
    simulation = Simulation(OrderedAdmission(CHUNKED, EarliestDeadlineFirst()), max_running=1)
    simulation.run(jobs)
    assert [each.sequence_id for each in simulation.done] == [2, 0, 1]
