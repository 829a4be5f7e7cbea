"""PriorityOrder: lower values first, as in vLLM."""

from step_simulation import Job, Simulation

from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.priority import PriorityOrder
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import Hints

POLICY = OrderedAdmission(SarathiServe(token_budget=64, max_running=1), PriorityOrder())


def test_lower_values_run_first_and_ties_in_order_of_arrival() -> None:
    priorities = [0, 3, -2, 0, 3]
    jobs = [Job(0.0, 50, hints=Hints(priority=value)) for value in priorities]
    simulation = Simulation(POLICY, max_running=1)
    simulation.run(jobs)
    assert [each.sequence_id for each in simulation.done] == [2, 0, 3, 1, 4]


def test_an_important_request_that_comes_later_is_admitted_next() -> None:
    jobs = [Job(0.0, 50, 20), Job(0.0, 50, 20), Job(0.1, 50, 1, hints=Hints(priority=-1))]
    done = Simulation(POLICY, max_running=1).run(jobs)
    assert done[2].token_times[0] < done[1].token_times[0]
