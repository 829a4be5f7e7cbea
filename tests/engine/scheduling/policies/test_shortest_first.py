"""ShortestPromptFirst: what Nexus promises of its order of prefills."""

import math

import pytest
from schedule_states import CacheFacts
from step_simulation import Job, Simulation, mean_ttft

from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.policies.shortest_first import ShortestPromptFirst
from midfill.engine.scheduling.scheduler import Hints, ScheduleState, WaitingSequence

CHUNKED = SarathiServe(token_budget=64, max_running=2)


def ordered(ageing: float) -> OrderedAdmission:
    return OrderedAdmission(CHUNKED, ShortestPromptFirst(max_wait=math.inf, ageing=ageing))


def test_mean_time_to_first_token_is_below_first_come_first_served() -> None:
    jobs = [Job(0.0, 2000 if n % 5 == 0 else 50, 4) for n in range(40)]
    shortest, fcfs = Simulation(ordered(15.0), max_running=2), Simulation(CHUNKED, max_running=2)
    assert mean_ttft(shortest.run(jobs)) < 0.5 * mean_ttft(fcfs.run(jobs))


def test_without_ageing_a_long_prompt_starves_and_with_it_it_runs_in_bounded_time() -> None:
    # Short prompts arrive faster than they are answered, for as long as the test runs.
    stream = [Job(0.05 * n, 60, 2) for n in range(2000)]
    jobs = [Job(0.0, 60, 2), Job(0.0, 60, 2), Job(0.0, 300, 2), *stream]
    starving = Simulation(ordered(0.0), max_running=2).run(jobs, until=60.0)
    assert not starving[2].token_times
    aged = Simulation(ordered(15.0), max_running=2).run(jobs, until=60.0)
    # It counts 240 tokens more than those that arrive 16 s later.
    assert 15.0 < aged[2].ttft < 40.0


def test_cached_tokens_do_not_count() -> None:
    jobs = [Job(0.0, 500, 40), Job(0.0, 500, 40), Job(0.0, 300), Job(0.0, 400, cached=390)]
    done = Simulation(ordered(15.0), max_running=2).run(jobs)
    assert done[3].ttft < done[2].ttft


def test_rows_of_a_batch_keep_the_order_of_their_file() -> None:
    rows = [(1, 500, True), (2, 20, True), (3, 90, False), (4, 30, False)]
    queue = tuple(
        WaitingSequence(number, length, arrived=float(number), hints=Hints(offline=offline))
        for number, length, offline in rows
    )

    def first_of(*numbers: int) -> list[int]:
        waiting = tuple(each for each in queue if each.sequence_id in numbers)
        state = ScheduleState((), waiting, 1000, CacheFacts(), now=5.0)
        return [each.sequence_id for each in ShortestPromptFirst().sort_queue(state)]

    assert first_of(1, 2) == [1, 2]
    assert first_of(3, 4) == [4, 3]


def test_a_negative_ageing_is_refused() -> None:
    with pytest.raises(ValueError, match="ageing must be at least 0"):
        ShortestPromptFirst(ageing=-1.0)
