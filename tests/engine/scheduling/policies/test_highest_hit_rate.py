"""HighestHitRate: what KVShare promises of its scheduler."""

import math
import random

import pytest
from schedule_states import CacheFacts
from step_simulation import Job, Simulation, mean_ttft

from midfill.engine.scheduling.policies.highest_hit_rate import HighestHitRate
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence
from midfill.kv.radix_cache import CachedPrefix

CHUNKED = SarathiServe(token_budget=64, max_running=2)


def test_the_share_that_is_cached_decides_and_not_the_number_of_tokens() -> None:
    cache = CacheFacts(cached={2: CachedPrefix(100, 0), 3: CachedPrefix(40, 0)})
    queue = (WaitingSequence(1, 10), WaitingSequence(2, 1000), WaitingSequence(3, 50))
    policy = OrderedAdmission(SarathiServe(token_budget=10_000), HighestHitRate())
    plan = policy.plan(ScheduleState((), queue, 10_000, cache))
    assert [chunk.sequence_id for chunk in plan.admit] == [3, 2, 1]


def test_what_stands_elsewhere_counts_as_well() -> None:
    cached = {2: CachedPrefix(50, 0), 3: CachedPrefix(10, 0)}
    cache = CacheFacts(cached=cached, elsewhere={3: 60})
    queue = (WaitingSequence(1, 100), WaitingSequence(2, 100), WaitingSequence(3, 100))
    policy = OrderedAdmission(SarathiServe(token_budget=10_000), HighestHitRate())
    plan = policy.plan(ScheduleState((), queue, 10_000, cache))
    assert [chunk.sequence_id for chunk in plan.admit] == [3, 2, 1]


def test_mean_time_to_first_token_is_below_first_come_first_served() -> None:
    chance = random.Random(1)
    jobs = [
        Job(0.0, 400, 2, cached=int(400 * chance.choice((0.0, 0.3, 0.6, 0.95)))) for _ in range(40)
    ]
    policy = OrderedAdmission(CHUNKED, HighestHitRate())
    by_hits = Simulation(policy, max_running=2).run(jobs)
    assert mean_ttft(by_hits) < 0.8 * mean_ttft(Simulation(CHUNKED, max_running=2).run(jobs))


def test_no_request_waits_beyond_the_ageing_bound() -> None:
    stream = [Job(0.03 * n, 80, 2, cached=40) for n in range(1500)]
    busy = [Job(0.0, 80, answer, cached=79) for answer in (30, 50)]
    jobs = [*busy, Job(0.0, 100, 2), *stream]

    def served(ageing: float) -> list[float]:
        order = HighestHitRate(max_wait=math.inf, ageing=ageing)
        run = Simulation(OrderedAdmission(CHUNKED, order), max_running=2).run(jobs, until=50.0)
        return run[2].token_times

    assert not served(0.0)
    # Half a prompt is what the others have more in the cache: five seconds at 0.1 a second.
    assert 4.0 < served(0.1)[0] < 20.0


def test_a_negative_ageing_is_refused() -> None:
    with pytest.raises(ValueError, match="ageing must be at least 0"):
        HighestHitRate(ageing=-0.1)
